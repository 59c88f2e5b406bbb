"""What must not be forgotten, watched in training: against an evaluation by hand, and what is kept and when it ends."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from data_contracts.arrow import read_table
from data_contracts.config import GovernConfig, TrainConfig
from data_contracts.errors import ArtifactError, InputError
from data_contracts.tables import CURVE
from stages.govern.decide import decide
from stages.govern.stage import GovernSlice
from stages.meter.flops import FlopModel
from stages.model.checkpoint import load_merged
from stages.stage import Artifact
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.stage import STAGE, TrainSlice
from stages.train.validate import Validation
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.train.small import House, plan_of, token_columns

ROWS = 7
HOW = {"learning_rate": 3e-2, "warmup_steps": 0, "epochs": 2.0, "evaluations": 6, "snapshot_steps": 4}


class Kept:
    """A house with a retention set: its warm-up, and the segments that follow it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.house = folder, House(folder, rows=24)
        tables = {"tokens": (24, 1, 2), "validation_tokens": (24, 1, 2), "retention_tokens": (ROWS, 9, 40)}
        given = LocalWork(folder / "kept", dict.fromkeys(tables, "tokens"))
        for name, (
            rows,
            seed,
            first,
        ) in tables.items():  # validation falls, for it is trained on; what is kept has other words
            columns = token_columns(rows, seed)
            ids = [[first + number % 20 for number in row] for row in columns["input_ids"]]
            given.table(name, {**columns, "input_ids": ids})
            self.house.artifacts[name] = given.artifact(name)
        self.tokens = self.house.artifacts.pop("retention_tokens")
        self.begun = self.begin("begun", retention_tokens=self.tokens)

    def begin(self, name: str, **more: Artifact) -> LocalWork:
        work = work_for(BEGIN, self.folder / name, seed=3)
        train = {key: HOW[key] for key in ("learning_rate", "warmup_steps")}
        config = BeginSlice(seed=3, begin={"fraction": 0.3}, train=train)
        given = {name: self.house.begin_inputs().one(name) for name in self.house.begin_inputs().names()}
        BEGIN.run(config, inputs_of(**given, **more), work)
        return work

    def train(self, name: str, most: float | None = None, **more: Artifact) -> tuple[LocalWork, dict]:
        given = {"retention_tokens": self.tokens, "retention_reference": self.begun.artifact("retention_losses")}
        given["checkpoint"] = self.begun.artifact("checkpoint")
        govern = GovernConfig(policy={"method": "fixed_rounds"}, most_forgotten_nats=most)
        work = work_for(STAGE, self.folder / name, seed=3)
        config = TrainSlice(seed=3, train=TrainConfig(**HOW), govern=govern)
        given |= self.house.artifacts | more
        return work, STAGE.run(config, inputs_of(**{k: v for k, v in given.items() if v}), work).facts


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return Kept(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def free(kept):
    """A segment without a limit, which forgets: its work."""
    return kept.train("free")[0]


def evaluated(work: LocalWork) -> list[dict]:
    return [row for row in work.rows("curve") if row["retention_loss"] is not None]


def by_hand(kept: Kept, checkpoint: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (nats, answer tokens) of each retention row, one at a time in float64."""
    model = load_merged(checkpoint, kept.house.pin).double().eval()
    sums, counts = [], []
    for row in kept.tokens.table().to_pylist():
        ids, wanted = torch.tensor(row["input_ids"]), torch.tensor(row["answer_mask"][1:])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        sums.append(float(functional.cross_entropy(logits[wanted], ids[1:][wanted], reduction="sum")))
        counts.append(int(wanted.sum()))
    return np.array(sums), np.array(counts)


def clustered(sums_D: np.ndarray, counts_D: np.ndarray) -> float:
    """Return the standard error of Σs / Σn over documents (Cochran 1977, 2.11)."""
    left = sums_D - sums_D.sum() / counts_D.sum() * counts_D
    return math.sqrt(len(sums_D) / (len(sums_D) - 1) * (left**2).sum()) / counts_D.sum()


def test_the_curve_tells_what_an_evaluation_by_hand_tells_with_the_error_of_paired_documents(kept, free):
    before, counts = by_hand(kept, None)
    start, *_, after_warm_up = evaluated(kept.begun)
    assert (start["step"], start["retention_rise_se"]) == (0, 0.0)
    assert start["retention_loss"] == pytest.approx(before.sum() / counts.sum(), rel=1e-5)
    assert start["retention_se"] == pytest.approx(clustered(before, counts), rel=1e-4)
    end = kept.begun.artifact("checkpoint").folder
    warm, _ = by_hand(kept, end)
    assert after_warm_up["retention_loss"] == pytest.approx(warm.sum() / counts.sum(), rel=1e-5)
    assert after_warm_up["retention_rise_se"] == pytest.approx(clustered(warm - before, counts), rel=1e-3)
    best = min(evaluated(free), key=lambda row: row["validation_loss"])  # of a segment whose reference was given to it
    now, _ = by_hand(kept, free.artifact("checkpoint").folder)
    assert best["retention_loss"] == pytest.approx(now.sum() / counts.sum(), rel=1e-5)
    assert best["retention_rise_se"] == pytest.approx(clustered(now - before, counts), rel=1e-3)
    assert [row["retention_loss"] is None for row in free.rows("curve")] == [
        row["validation_loss"] is None for row in free.rows("curve")
    ]
    rows = free.rows("retention_losses")
    assert len(rows) == ROWS * len(evaluated(free))
    last = [row["loss_sum"] for row in rows if row["step"] == evaluated(free)[-1]["step"]]
    assert sum(last) / counts.sum() == pytest.approx(evaluated(free)[-1]["retention_loss"], rel=1e-12)


def test_it_is_charged_as_evaluation_and_a_segment_without_it_is_as_it_ever_was(kept, free):
    plain, facts = kept.train("plain", retention_tokens=None, retention_reference=None)
    assert plain.artifact("curve").table().schema == CURVE.schema
    assert "retention_losses" not in plain.opened
    assert not [fact for fact in facts if "retention" in fact]
    spent, without = (work.ledger().by_cause() for work in (free, plain))
    assert spent["train"].flops == without["train"].flops
    model = load_merged(None, kept.house.pin)
    meter = FlopModel.trace(model, train=False)
    plan = plan_of()
    rows = Validation(kept.tokens.folder / "data.arrow", None, plan.micro_batch * plan.row_tokens)
    times = len(evaluated(free))
    assert spent["eval"].flops - without["eval"].flops == times * rows.flops(meter)
    assert spent["eval"].tokens - without["eval"].tokens == times * rows.tokens
    assert free.rows("curve")[-1]["flops"] == spent["train"].flops + spent["eval"].flops
    same = [{name: row[name] for name in CURVE.schema.names if name != "flops"} for row in free.rows("curve")]
    assert same == [{name: row[name] for name in row if name != "flops"} for row in plain.rows("curve")]


def test_a_segment_ends_where_too_much_is_forgotten_and_its_checkpoint_has_not(kept, free):
    seen, began = evaluated(free), evaluated(kept.begun)[0]["retention_loss"]
    sure = [row["retention_loss"] - began - 1.6448536269514722 * row["retention_rise_se"] for row in seen]
    assert sure == sorted(sure), "this segment forgets more and more"
    allowed = (sure[2] + sure[3]) / 2
    work, facts = kept.train("limited", allowed)
    assert evaluated(work) == seen[:4]
    best = min(seen[:3], key=lambda row: row["validation_loss"])
    assert facts["checkpoint_step"] == best["step"] < seen[3]["step"]
    assert min(seen[:4], key=lambda row: row["validation_loss"]) == seen[3], "by validation alone it were the last"
    assert "must not be forgotten" in facts["ended"]
    assert facts["retention_after"] == best["retention_loss"]
    assert "end" not in work.opened
    choices = read_table(work.measured("curve", "choices.arrow")).to_pylist()
    assert [row["action"] for row in choices] == ["continue"] * 3 + ["end"]
    settings = GovernSlice(budget={}, govern={"most_forgotten_nats": allowed}, train={})
    parts = (kept.begun, work)
    first, _ = decide(settings, *given(kept.begun), plan_of(), None, kept.begun.ledger())
    decision, _ = decide(settings, *given(*parts), plan_of(), first, work.ledger())
    assert (first.stops, decision.stops) == (False, True)
    assert (decision.best, decision.best_step) == (work.artifact("checkpoint").ref.digest, best["step"])


def given(*works: LocalWork) -> tuple[list, list]:
    return [work.artifact("curve").table() for work in works], [work.artifact("checkpoint").ref for work in works]


def test_where_every_evaluation_has_forgotten_the_one_that_forgot_least_is_left_and_it_is_said(kept, free):
    work, facts = kept.train("none", 0.0)
    assert facts["checkpoint_step"] == evaluated(free)[0]["step"]
    assert len(evaluated(work)) == 1
    assert "forgotten least" in " ".join(work.notices)


def test_resumed_from_a_snapshot_it_leaves_the_same_bytes_also_where_the_segment_made_the_reference(kept):
    start = {"retention_reference": None, "checkpoint": None}
    work, _ = kept.train("whole", 9.0, **start)
    curve = work.rows("curve")
    assert (curve[0]["step"], curve[0]["retention_rise_se"]) == (0, 0.0)
    outputs = ("curve", "retention_losses", "checkpoint")
    digests = [work.artifact(name).ref.digest for name in outputs]
    (kept.folder / "whole/scratch/result.json").unlink()  # what a kill after the last snapshot leaves
    shutil.rmtree(kept.folder / "whole/outputs")
    again, _ = kept.train("whole", 9.0, **start)
    assert [again.artifact(name).ref.digest for name in outputs] == digests


def test_a_limit_without_a_retention_set_and_a_reference_of_other_rows_are_refused(kept):
    with pytest.raises(InputError, match="retention"):
        kept.train("no-set", 0.1, retention_tokens=None)
    others = LocalWork(kept.folder / "others", dict.fromkeys(("more", "same"), "tokens"))
    for name, rows in (("more", ROWS + 1), ("same", ROWS)):
        others.table(name, token_columns(rows, 8))
        with pytest.raises(ArtifactError, match="of 7 other ones"):
            kept.train(name, 0.1, retention_tokens=others.artifact(name))
