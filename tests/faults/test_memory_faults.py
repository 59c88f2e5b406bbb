"""Faults 5 and 11: large tables held by the flow, and memory that runs out."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_contracts.errors import BudgetError
from data_contracts.store import Store
from stages import runner
from stages.ending import out_of_memory
from tests.conftest import ROOT
from tests.stages import toys
from tests.stages.test_runner import make, statuses
from tests.stores import blank

TABLE_BYTES = float(os.environ.get("LAZYTRAIN_TABLE_BYTES", "5e7"))
"""1e9 is the size that is promised; the default keeps CI quick, and what is asserted does not grow with it."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc to tell held memory from mapped files")
def test_05_a_large_table_passes_five_stages_by_reference(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.big_table", str(tmp_path), str(TABLE_BYTES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    assert figures["table_bytes"] > 0.9 * TABLE_BYTES
    assert figures["rss_growth_bytes"] < 60e6, figures
    assert figures["largest_parameters_bytes"] < 10_000
    assert figures["large_tables_on_disk"] == 1, "it lies once, where it was committed"
    assert figures["other_bytes_on_disk"] < 50e6, figures


def _hoard(path: str) -> None:
    """Run the request in a process that may have 300 MB more than it has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + 300 * 2**20,) * 2)
    request = runner.Request.model_validate_json(Path(path).read_bytes())
    try:
        runner.run(request)
    except BudgetError as error:
        Path(path).with_suffix(".told").write_text(str(error))
        os._exit(error.exit_code)
    os._exit(99)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a limit on address space needs Linux")
def test_11_memory_that_runs_out_is_told_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)
    address = blank(tmp_path)
    path = tmp_path / "request.json"
    path.write_text(make(address, knobs={"act": "hoard", "log": str(tmp_path / "log")}).model_dump_json())
    process = multiprocessing.get_context("fork").Process(target=_hoard, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 2, "refused: a scheduler must not try it again as it is"
    told = path.with_suffix(".told").read_text()
    assert "budget.peak_bytes" in told
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert statuses(address) == ["FAILED"]
    assert runner.run(make(address)).cached is False, "with less it goes on"
    assert len(Store(address).runs()) == 0


def test_11_what_libraries_raise_when_memory_runs_out_is_known() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**60)
    assert out_of_memory(torchs.value)
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shapes differ"))
