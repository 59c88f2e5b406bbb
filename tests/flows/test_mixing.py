"""A mixture is made where one is asked for, from what its method reads and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import Config
from data_contracts.config_file import parse
from data_contracts.errors import MethodError
from data_contracts.records import Ref, Result
from data_contracts.store import Store
from flows.calling import call_directly
from flows.mixing import mixed
from flows.pipeline import trained
from flows.pipeline_run import PipelineRun
from flows.workspace import Workspace
from tests.flows.small_run import lay_out

NAMES = ("pool_tokens", "base", "plan", "checkpoint", "target_tokens", "scores", "features", "previous")


def config(mixture: dict[str, Any] | None) -> Config:
    return parse({"model": {"path": "m"}, "data": {"pool": ["a"], "target": ["b"]}, "select": {"mixture": mixture}})


def ref(name: str) -> Ref:
    return Ref(contract="mixture/1", run="r" * 32, path=name, digest="0" * 64)


def call_of(mixture: dict[str, Any] | None) -> tuple[list[str], tuple[Ref, ...]]:
    seen: list[str] = []

    def call(verb: str, **inputs: tuple[Ref, ...]) -> Result:
        assert verb == "mix"
        assert all(refs == (ref(name),) for name, refs in inputs.items())
        seen.extend(sorted(inputs))
        return Result(stage="mix", identity="i", run="r", cached=False, refs={"mixture": ref("made")})

    given = {name: (ref(name),) for name in (*NAMES, "example_losses")}
    made = mixed(config(mixture), call, **given)
    return seen, made


@pytest.mark.parametrize(
    ("mixture", "inputs"),
    [
        ({"method": "fixed"}, ["pool_tokens"]),
        ({"method": "op_mix"}, ["base", "checkpoint", "plan", "pool_tokens", "target_tokens"]),
        ({"method": "gst"}, ["features", "pool_tokens", "scores"]),
        ({"method": "odm"}, ["example_losses", "pool_tokens", "previous"]),
    ],
)
def test_the_stage_is_given_what_the_method_reads(mixture, inputs):
    assert call_of(mixture) == (inputs, (ref("made"),))


def test_nothing_is_made_where_no_mixture_is_asked_for_and_an_unknown_one_is_refused():
    assert call_of(None) == ([], ())
    with pytest.raises(MethodError, match="did you mean 'op_mix'"):
        call_of({"method": "opmix"})


@pytest.mark.shared
def test_a_run_tries_a_mixture_out_before_it_selects_and_keeps_its_shares(tmp_path, shared):
    probe = {"steps": 2, "window": 2, "r": 2, "alpha": 4}
    mixture = {"method": "op_mix", "probe": probe, "points": 4, "held_out": 3, "starts": 1, "target_rows": 2}
    path = lay_out(
        tmp_path,
        shared,
        data={"pool": ["pool.jsonl", "web.jsonl"]},
        ingest={"longest_tokens": 64},
        budget={"flops": 10**12},
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
        score={"scorer": {"method": "length"}},
        select={"fraction": 0.5, "mixture": mixture | {"least_correlation": -1.0, "tolerance": 1e9}},
        train={"evaluations": 1},
        govern={"rounds": 1},
    )
    rows = [{"prompt": f"Page {number}:", "completion": f"words about {number} things"} for number in range(12)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workspace = Workspace.read(path)
    store = Store(workspace.address)
    run = PipelineRun(workspace, store, store.open_run("mixed", {}), call_directly)
    trained(run)
    steps = {step.name: step for step in run.steps}
    names = list(steps)
    assert names.index("score-round-1") < names.index("mix-round-1") < names.index("select-round-1")
    made = read_table(store.open(steps["mix-round-1"].refs["mixture"]) / TABLE_FILE).to_pylist()
    assert [row["part"] for row in made] == ["pool", "web"]
    assert sum(row["share"] for row in made) == pytest.approx(1)
    chosen = read_table(store.open(steps["select-round-1"].refs["selection"]) / TABLE_FILE).to_pylist()
    count = {part: sum(row["mixture"] == part for row in chosen) for part in ("pool", "web")}
    wanted = {row["part"]: min(row["share"] * len(chosen), row["rows"]) for row in made}
    assert count["web"] == pytest.approx(wanted["web"], abs=1.0) or count["pool"] == pytest.approx(
        wanted["pool"], abs=1.0
    )
    ledger = store.ledger([ref for step in run.steps for ref in step.refs.values()])
    assert ledger.by_cause()["probe"].flops > 0
    assert ledger.by_stage()["mix"].flops == ledger.by_cause()["probe"].flops
