"""Methods of what training logged, and RHO-loss, against explicit computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_contracts.errors import ArtifactError
from stages.model.checkpoint import load_checkpoint
from stages.stage import Artifact
from stages.statistics.trajectories import Trajectories
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import Setting, checkpoint_of, make_setting, moved_checkpoint

VISITS = {
    "01-0000": [3.0, 2.0, 2.5, 1.0, 1.2],
    "01-0001": [2.0, 1.9, 1.93, 1.5],
    "01-0002": [2.0, 1.0, 0.5],
    "01-0003": [4.0],
}


def logged(folder: Path, offset: int = 0, visits: slice = slice(None)) -> Artifact:
    """Write visits as training does: sorted by step and position, examples mixed."""
    work = LocalWork(folder, {"e": "example_losses"})
    rows = [
        {
            "step": offset + 10 * turn,
            "position": place,
            "example_id": example_id,
            "loss_sum": 3 * loss,
            "answer_tokens": 3,
        }
        for place, (example_id, losses) in enumerate(VISITS.items())
        for turn, loss in enumerate(losses[visits])
    ]
    with work.writer("e") as writer:
        for row in sorted(rows, key=lambda row: (row["step"], row["position"])):
            writer.append(row)
    return work.artifact("e")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    made = make_setting(tmp_path, pool=rows_of(6, seed=1))
    early, late = logged(tmp_path / "early", 0, slice(2)), logged(tmp_path / "late", 1000, slice(2, None))
    made.inputs["example_losses"] = [early, late]
    return made


def test_trajectories_put_visits_in_order_over_segments(setting: Setting) -> None:
    found = Trajectories([artifact.folder for artifact in setting.inputs["example_losses"]])
    for example_id, losses in VISITS.items():
        np.testing.assert_allclose(found.of(example_id), losses, rtol=1e-6)
    assert len(found.of("01-0004")) == len(found.of("")) == 0


def test_forgetting_counts_rises_and_refuses_what_was_visited_once_or_never(setting: Setting) -> None:
    work, summary = setting.score(scorer={"method": "forgetting"})
    found = {row["example_id"]: row["score"] for row in work.rows("scores")}
    assert found == {
        "01-0000": 2, "01-0001": 0, "01-0002": 0, "01-0003": None, "01-0004": None, "01-0005": None
    }  # fmt: skip
    assert setting.scores("any", scorer={"method": "forgetting", "rise": 0})["01-0001"]["score"] == 1
    refused = {row["example_id"]: (row["reason"], row["detail"]) for row in work.rows("quarantine")}
    assert refused["01-0003"] == ("too_few_visits", "training visited it 1 times, of 2 that are needed")
    assert "visited it 0 times" in refused["01-0005"][1]
    assert summary.facts["quarantined"] == 3


def test_a_learning_trajectory_holds_the_first_the_last_and_what_lies_between(setting: Setting) -> None:
    work, _ = setting.score(scorer={"method": "learning_trajectory", "points": 3})
    found = {row["example_id"]: row for row in work.rows("scores")}
    expected = {"01-0000": [3.0, 2.5, 1.2], "01-0001": [2.0, 1.93, 1.5], "01-0002": [2.0, 1.0, 0.5]}
    for example_id, losses in expected.items():
        np.testing.assert_allclose(found[example_id]["group_scores"], losses, rtol=1e-6)
        assert found[example_id]["score"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert {row["example_id"] for row in work.rows("quarantine")} == {"01-0003", "01-0004", "01-0005"}


def test_rho_loss_is_the_difference_of_mean_losses_by_two_checkpoints(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    with pytest.raises(ArtifactError, match="an input `reference`"):
        setting.score("none", scorer={"method": "rho_loss"})
    setting.inputs["reference"] = checkpoint_of(tmp_path / "reference", setting.pin)
    reference = load_checkpoint(setting.inputs["reference"].folder, setting.pin).model
    assert all(row["score"] == 0 for row in setting.scores("same", scorer={"method": "rho_loss"}).values())
    moved = moved_checkpoint(tmp_path / "moved", setting.pin)
    setting.inputs["checkpoint"] = moved
    models = load_checkpoint(moved.folder, setting.pin).model, reference
    found = setting.scores("moved", scorer={"method": "rho_loss"})
    work, _ = setting.score("cost", scorer={"method": "rho_loss"})
    single, _ = setting.score("single", scorer={"method": "perplexity"})
    assert work.ledger().total.flops == 2 * single.ledger().total.flops
    for row in rows_of(24, seed=1):
        losses = [loss / tokens for _, loss, tokens in (explicit_gradient(model, row) for model in models)]
        assert found[row.example_id]["score"] == pytest.approx(losses[0] - losses[1], abs=1e-5)
