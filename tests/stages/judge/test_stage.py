"""The judge stage on tables written by hand."""

from __future__ import annotations

import json

import pytest

from data_contracts.errors import ArtifactError
from data_contracts.records import Ref, Verdict
from stages.judge.stage import STAGE, JudgeSlice
from stages.stage import Artifact, Inputs
from tests.local_work import LocalWork, work_for
from tests.stages.judge.tables import losses, rows, table


def example(id_, question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {
        "example_id": id_,
        "source": "s",
        "file": "f",
        "row": 1,
        "messages": json.dumps(messages),
        "tools": "",
        "text": "",
        "extra": "{}",
    }


HOLDOUT = [example("h1", "Largest planet?", "Jupiter."), example("h2", "Boiling point?", "100.")]
POOL = [
    example("p1", "Smallest planet?", "Mercury."),
    example("p2", "boiling  POINT?", "100."),
    example("p3", "Largest planet?", "Jupiter, by far."),
]


def selection(ids):
    return {
        "rank": list(range(len(ids))),
        "example_id": ids,
        "weight": [1.0] * len(ids),
        "repeats": [1] * len(ids),
        "order": [0] * len(ids),
        "mixture": ["s"] * len(ids),
        "gain": [None] * len(ids),
        "reason": ["chosen"] * len(ids),
    }


def columns(items):
    return {key: [item[key] for item in items] for key in items[0]}


def judge(tmp_path, chosen, *, candidate=True, target=None):
    maker = LocalWork(
        tmp_path / "made",
        {
            "evaluation": "evaluation",
            "pool": "examples",
            "target": "examples",
            "holdout": "examples",
            **{f"selection{i}": "selection" for i in range(len(chosen))},
        },
    )
    maker.table("evaluation", table(rows("base", losses(1, 3.0)), rows("candidate", losses(2, 2.0))))
    maker.table("pool", columns(POOL))
    maker.table("holdout", columns(HOLDOUT))
    for i, ids in enumerate(chosen):
        maker.table(f"selection{i}", selection(ids))
    given = {name: [maker.artifact(name)] for name in ("evaluation", "pool", "holdout")}
    given["selection"] = [maker.artifact(f"selection{i}") for i in range(len(chosen))]
    if target:
        maker.table("target", columns(target))
        given["target"] = [maker.artifact("target")]
    if candidate:
        ref = Ref(contract="checkpoint/1", run="r", path="checkpoint", digest="c" * 64)
        given["candidate"] = [Artifact(ref, tmp_path)]
    work = work_for(STAGE, tmp_path / "work")
    summary = STAGE.run(JudgeSlice(), Inputs(given), work)
    return work.artifact("verdict").record(Verdict), work.rows("contamination"), summary


def test_a_clean_selection_of_a_better_model_is_promoted_with_its_lineage(tmp_path):
    verdict, met, summary = judge(tmp_path, [["p1"]])
    assert (verdict.outcome, met) == ("promote", [])
    assert verdict.candidate == "c" * 64
    assert len(verdict.numbers["selection_0_digest"]) == 64
    assert summary.title == "verdict: promote"


def test_a_leak_in_any_selection_rejects_and_is_written_down(tmp_path):
    verdict, met, _ = judge(tmp_path, [["p1"], ["p2", "p3"]])
    assert verdict.outcome == "reject"
    assert [(row["item_id"], row["example_id"], row["kind"]) for row in met] == [
        ("h1", "p3", "prompt"),
        ("h2", "p2", "normalised"),
    ]


def test_rows_that_were_not_selected_are_not_counted(tmp_path):
    _, met, _ = judge(tmp_path, [["p1"]])
    assert met == []


def test_target_rows_that_were_trained_on_are_compared_too(tmp_path):
    _, met, _ = judge(tmp_path, [["p1", "t1"]], target=[example("t1", "Boiling point?", "100.")])
    assert [(row["item_id"], row["example_id"], row["kind"]) for row in met] == [("h2", "t1", "exact")]


def test_a_selected_row_that_cannot_be_looked_at_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="t1"):
        judge(tmp_path, [["p1", "t1"]])


def test_without_a_candidate_the_verdict_rejects(tmp_path):
    verdict, _, _ = judge(tmp_path, [["p1"]], candidate=False)
    assert verdict.outcome == "reject"
    assert "no candidate" in verdict.reason


def test_the_same_evidence_gives_the_same_verdict(tmp_path):
    assert judge(tmp_path / "a", [["p1"]])[0] == judge(tmp_path / "b", [["p1"]])[0]
