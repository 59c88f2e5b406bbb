"""The start of Prefect's embedded server: a slow answer is waited for, an early end is told at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from data_contracts.errors import TransientError
from flows import embedded

SLOW_SECONDS = 6.0  # httpx waits five


class Slow(BaseHTTPRequestHandler):
    """Answers its first request late, as a server on a busy machine does."""

    asked = 0

    def do_GET(self) -> None:
        Slow.asked += 1
        if Slow.asked == 1:
            time.sleep(SLOW_SECONDS)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer(port=1)
    server.server_process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield server
    server.stop()


def test_a_server_too_busy_to_answer_at_once_is_waited_for(server: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.port = listening.server_address[1]
        embedded._wait(server)
        listening.shutdown()
    assert Slow.asked >= 2
    assert server.server_process.poll() is None


def test_a_server_that_ends_is_told_at_once_with_its_exit_code(server: Any) -> None:
    server.server_process.kill()
    server.server_process.wait()
    began = time.monotonic()
    with pytest.raises(TransientError, match="exit code -9"):
        embedded._wait(server)
    assert time.monotonic() - began < 5
