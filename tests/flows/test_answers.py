"""A Prefect server that refuses, fails or is gone is told in three lines, with whether trying again may help."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from data_contracts.errors import ConfigError, TransientError
from flows.answers import server_answers
from tests.command import lazytrain
from tests.flows.small_run import lay_out


def answered(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://127.0.0.1:9/api")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, text="locked", request=request))


@pytest.mark.parametrize(("code", "kind"), [(401, ConfigError), (422, ConfigError), (500, TransientError)])
def test_a_refusal_is_the_configurations_fault_and_a_failure_may_pass(code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="locked" if kind is ConfigError else "HTTPStatusError"), server_answers():
        raise answered(code)


def test_what_prefect_wraps_is_seen_through_and_other_errors_are_left_alone() -> None:
    with pytest.raises(TransientError, match="ReadTimeout"), server_answers():
        raise RuntimeError("Failed to reach API") from httpx.ReadTimeout("late")
    with pytest.raises(RuntimeError, match="of ours"), server_answers():
        raise RuntimeError("of ours") from ValueError("no server in it")


@pytest.mark.shared
def test_a_run_whose_server_is_gone_may_be_tried_again(tmp_path: Path, shared: Path) -> None:
    lay_out(tmp_path, shared)
    where = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = lazytrain("run", cwd=tmp_path, **where)
    assert done.returncode == 3, done.stderr
    assert "lazytrain resume" in done.stderr
    assert "Traceback" not in done.stderr
    lazytrain("plan", cwd=tmp_path)
    told = lazytrain("status", cwd=tmp_path, **where)
    assert told.returncode == 3, told.stderr
    assert "expected: the Prefect server" in told.stderr
    assert "Runs" in told.stdout, "the store is shown without the server"
