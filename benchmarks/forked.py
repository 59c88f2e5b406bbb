"""An arm of a benchmark in a process of its own, so that its memory is its own."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_own_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a fork of this process (CPU only: torch's autograd has started no thread) and return its answer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "w") as stream:
                json.dump(work(), stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"an arm ended with status {status}")
    said: dict[str, Any] = json.loads(text)
    return said
