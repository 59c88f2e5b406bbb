"""A secret stands in the environment and nowhere else: not in what is recorded, shown or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config_file import parse
from data_contracts.errors import ConfigError
from stages import __main__ as entry
from tests.command import lazytrain

SECRET = "hunter2-is-secret"
LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"pool": "p", "target": "t"}}
ADDRESSES = [
    f"postgresql://user:{SECRET}@host/db",
    f"https://user:{SECRET}@host:5000",
    f"postgresql://host/db?user=u&password={SECRET}",
    f"https://host/?token={SECRET}",
    f"https://[user:{SECRET}@host",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_password_is_refused_without_being_repeated(address: str) -> None:
    for key in ("tracking_uri", "work_uri"):
        with pytest.raises(ConfigError, match="environment") as caught:
            parse({**LEAST, "store": {key: address}})
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("address", ["postgresql://user@host/db", "https://host:5000/a@b", "s3://bucket/work", "w"])
def test_an_address_without_one_is_taken(address: str) -> None:
    assert parse({**LEAST, "store": {"tracking_uri": address}}).store.tracking_uri == address


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_request_with_a_password_is_refused_without_being_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"verb": "score", "store": {"tracking_uri": address, "work_uri": "w"}}))
    assert entry.main(["score", str(path)]) == 2
    shown = capsys.readouterr()
    assert "environment" in shown.err
    assert SECRET not in shown.err + shown.out


def test_the_command_does_not_repeat_it_either(tmp_path: Path) -> None:
    (tmp_path / "lazytrain.yaml").write_text(json.dumps({**LEAST, "store": {"tracking_uri": ADDRESSES[0]}}))
    done = lazytrain("run", cwd=tmp_path)
    assert done.returncode == 2
    assert "environment" in done.stderr
    assert SECRET not in done.stderr + done.stdout


def test_a_request_that_is_too_large_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(" " * (entry.LARGEST_REQUEST_BYTES + 1))
    assert entry.main(["score", str(path)]) == 2
    assert "pass references, not data" in capsys.readouterr().err


def test_a_configuration_that_unfolds_without_end_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "lazytrain.yaml").write_text("\n".join(lines))
    done = lazytrain("run", cwd=tmp_path)
    assert done.returncode == 2
    assert "unfolds" in done.stderr
