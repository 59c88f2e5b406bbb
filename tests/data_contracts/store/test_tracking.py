"""A tracking database that cannot be opened is told as one, with its path."""

from __future__ import annotations

import logging

import pytest

from data_contracts.errors import ArtifactError
from data_contracts.records import StoreAddress
from data_contracts.store import tracking


def test_a_database_that_is_not_ours_is_refused_by_its_path(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(tracking, "FileLock", denied)  # as root every file can be written
    file = tmp_path / "mlflow.db"
    with pytest.raises(ArtifactError) as refused:
        tracking.Tracking(StoreAddress(tracking_uri=f"sqlite:///{file}", work_uri=str(tmp_path), artifact_uri=None))
    assert refused.value.promised == f"the database {file} can be written"
    assert "Permission denied" in refused.value.found


@pytest.mark.parametrize("home", ["file", "file/deeper"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, home):
    (tmp_path / "file").touch()
    uri = f"sqlite:///{tmp_path / home / 'mlflow.db'}"
    with pytest.raises(ArtifactError, match="can be written"):
        tracking.Tracking(StoreAddress(tracking_uri=uri, work_uri=str(tmp_path), artifact_uri=None))


def test_what_is_told_as_a_refusal_is_not_logged_with_a_traceback_as_well(tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.Tracking(StoreAddress(tracking_uri=uri, work_uri=str(tmp_path), artifact_uri=None))
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.ERROR)
