"""Eight pipelines at once on one cold store: all end, every record is there, nothing is committed twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import yaml

from tests.command import ROOT
from tests.flows.small_run import Runs, lay_out, write

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.timeout(900)]
PIPELINES, KINDS = 8, 2


def test_eight_pipelines_at_once_on_a_cold_sqlite_store(tmp_path, shared):
    config = lay_out(tmp_path, shared)
    values = yaml.safe_load(config.read_text())
    for kind in range(KINDS):  # two pieces of work, each asked for by four
        (tmp_path / f"{kind}.yaml").write_text(
            yaml.safe_dump(
                {**values, "name": f"kind-{kind}", "seed": kind, "promote": {"registered_model": f"kind-{kind}"}}
            )
        )
    write(tmp_path, values)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.command.app", "run", f"{number % KINDS}.yaml"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(PIPELINES)
    ]  # fmt: skip
    said = [child.communicate(timeout=800)[0] for child in children]
    failed = {child.returncode: text[-3000:] for child, text in zip(children, said, strict=True) if child.returncode}
    assert not failed, "\n".join(f"exit {code}: {text}" for code, text in failed.items())
    runs = Runs(tmp_path)
    store, rows = runs.store, runs.store.runs()
    assert Counter((row.name, row.status) for row in rows) == {("kind-0", "FINISHED"): 4, ("kind-1", "FINISHED"): 4}
    made: Counter[str] = Counter()
    for row in rows:
        attempts = store.attempts(row.run)
        assert len(attempts) == 12, [attempt.name for attempt in attempts]
        assert {attempt.status for attempt in attempts} == {"FINISHED"}
        made.update(item.identity for item in attempts if not item.cached and item.stage != "promote")
    assert set(made.values()) == {1}, "an identity was made twice"
    digests = {
        kind: {
            tuple(
                sorted(
                    ref.digest
                    for item in store.attempts(row.run)
                    if item.stage != "promote"
                    for ref in item.refs.values()
                )
            )
            for row in rows
            if row.name == f"kind-{kind}"
        }
        for kind in range(KINDS)
    }
    assert [len(found) for found in digests.values()] == [1] * KINDS, "pipelines that ask for the same get the same"
    assert not list((tmp_path / ".lazytrain" / "work").glob("*/claim-*")), "nothing is left in work"
