"""Fixtures of all tests: the data folder beside the project, and a quiet, offline environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.infra.services import Prefect

ROOT = Path(__file__).resolve().parent.parent

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
for name, value in OFFLINE.items():
    os.environ.setdefault(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--containers", action="store_true", help="also build and run images (minutes, 4 GB of disk)")


def pytest_xdist_auto_num_workers() -> int:
    """Return, for `-n auto`, one process more than cores: a quarter of the time tests wait for servers to act."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # files that take long begin first, so that none ends last
    if not config.getoption("--containers"):
        skip = pytest.mark.skip(reason="builds images, for minutes: `python -m pytest tests/containers --containers`")
        for item in items:
            if item.get_closest_marker("containers"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the data folder beside the project; skip the test where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the shared data folder at {folder.name}/ beside the project")
    return folder


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """Return a Prefect server on SQLite that looks at its workers and automations every second."""
    from tests.infra.services import prefect_server

    often = {
        "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "1",
        "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
    }
    with prefect_server(tmp_path_factory.mktemp("prefect"), **often) as server:
        yield server
