"""Fixtures of the container tests: the engine of this machine, and a small workspace whose data was ingested.

They build images, so they run where they are asked for: `python -m pytest tests/containers --containers`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_contracts.records import Request, Result, StoreAddress
from flows.workspace import Workspace, embedded_address
from stages import runner
from tests.containers import machine
from tests.flows.small_run import lay_out


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> machine.Engine:
    """Return the engine; the tests that were asked for fail where this machine has none."""
    if lacking := machine.missing():
        pytest.fail(f"this machine cannot build containers: {lacking}")
    folder = tmp_path_factory.mktemp("engine")
    mounts, has_torch = machine.mounts(folder)
    options = ["--debootstrap", *(part for mount in mounts for part in ("--mount", mount))]
    options += ["--torch-backend", "" if has_torch else "cpu", "--tag", "tests"]
    return machine.Engine(machine.environment(folder), options, folder)


@pytest.fixture(scope="session")
def score_image(engine: machine.Engine) -> str:
    """Return the image of the score stage."""
    return engine.build("score")[-1]


@pytest.fixture(scope="session")
def worker_image(engine: machine.Engine) -> str:
    """Return the image of the score stage that a Prefect worker starts."""
    return engine.build("--prefect", "score")[-1]


@dataclass
class Site:
    """A workspace on this machine: its configuration, and what ingest made of its data."""

    folder: Path
    workspace: Workspace
    ingested: Result

    def request(self, at: str | None = None, **changes: object) -> Request:
        """Return the request to score, as it reads where the workspace is mounted at `at`; none is here."""
        root = Path(at) if at else self.folder
        given = {name: self.ingested.ref(name) for name in ("base", "pool_tokens", "target_tokens", "pool", "target")}
        address = embedded_address(root / ".lazytrain")
        request = Request(
            verb="score", config=self.workspace.config.slice("score"), inputs=given, store=address,
            knobs={"root": str(root)},
        )  # fmt: skip
        return request.model_copy(update=changes)

    @property
    def address(self) -> StoreAddress:
        """The store, seen from here."""
        return self.workspace.address


@pytest.fixture(scope="session")
def site(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return a workspace that belongs to the images' user, its data ingested in this process."""
    folder = tmp_path_factory.mktemp("site")
    workspace = Workspace.read(lay_out(folder, shared))
    request = Request(
        verb="ingest", config=workspace.config.slice("ingest"), store=workspace.address, knobs={"root": str(folder)}
    )
    ingested = runner.run(request)
    made = Site(folder, workspace, ingested)
    give_away(folder)
    return made


def give_away(folder: Path) -> None:
    """Let the images' user write everything below `folder`."""
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, machine.USER, machine.USER)
