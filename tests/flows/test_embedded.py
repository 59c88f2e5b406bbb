"""The start of Prefect's embedded server: a slow answer is waited for, an early end is told at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data_contracts.errors import TransientError
from flows import embedded
from tests.conftest import ROOT
from tests.infra.services import plain_environment

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


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    monkeypatch.setenv(embedded.URL, "")  # so that it is put back


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield server
    embedded._stop(server)


def test_a_server_too_busy_to_answer_at_once_is_waited_for(server: subprocess.Popen[bytes]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        embedded._wait(server, f"http://127.0.0.1:{listening.server_address[1]}/api")
        listening.shutdown()
    assert Slow.asked >= 2
    assert server.poll() is None


def test_a_server_that_ends_is_told_at_once_with_its_exit_code(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    began = time.monotonic()
    with pytest.raises(TransientError, match="exit code -9"):
        embedded._wait(server, "http://127.0.0.1:9/api")
    assert time.monotonic() - began < 5


def test_clients_of_the_process_find_the_server_without_importing_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from flows.environment import prepare; prepare(Path(sys.argv[1]))\n"
        "from flows.embedded import starting_server\n"
        "import prefect\n"  # read before the address is known
        "with starting_server(): pass\n"
        "from prefect.client.orchestration import get_client\n"
        "with get_client(sync_client=True) as client: print(client.read_flow_runs(), client.server_type.value)\n"
        "print('prefect.server.api.server' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=plain_environment(), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] SERVER", "False"]
