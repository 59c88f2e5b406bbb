"""The environment is quiet and offline by default, and what the user has set is left alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError
from flows.environment import OFFLINE, QUIET, prepare


@pytest.fixture
def bare(monkeypatch):
    """An environment without any of the variables; whatever a test sets is undone."""
    kept = dict(os.environ)
    for name in (*QUIET, *OFFLINE, "PREFECT_API_URL", "PREFECT_HOME", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(kept)


def test_everything_is_under_one_folder(bare, tmp_path):
    prepare(tmp_path / "deep" / "home")
    assert Path(os.environ["PREFECT_HOME"]) == tmp_path / "deep" / "home" / "prefect"
    assert Path(os.environ["PREFECT_HOME"]).is_dir()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["DO_NOT_TRACK"] == "1"


def test_what_the_user_has_set_is_left_alone(bare, tmp_path):
    bare.setenv("HF_HUB_OFFLINE", "0")
    bare.setenv("PREFECT_HOME", str(tmp_path / "mine"))
    prepare(tmp_path / "home")
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "mine")


def test_a_server_that_is_named_is_used(bare, tmp_path):
    bare.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    prepare(tmp_path / "home")
    assert "PREFECT_HOME" not in os.environ
    assert not (tmp_path / "home").exists()


def test_a_configuration_that_needs_the_hub_may_reach_it(bare, tmp_path):
    prepare(tmp_path, offline=False)
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_folder_that_cannot_be_made_is_refused(bare, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store\.home"):
        prepare(tmp_path / "file")


def test_a_folder_that_is_there_but_not_ours_is_refused(bare, tmp_path):
    (tmp_path / "prefect").mkdir()
    bare.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # as root every folder can be written
    with pytest.raises(ConfigError, match="Permission denied"):
        prepare(tmp_path)


def test_what_bitsandbytes_says_of_a_kernel_that_is_not_used_is_not_shown(bare, tmp_path):
    prepare(tmp_path)
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
