"""Scorers of one or two forward passes, and length: against float64 computed one example at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from stages.model.batch import Row
from stages.model.load import load_model
from tests.stages.gradients.small_models import rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import Setting, make_setting, odd_row


def logits_of(setting: Setting, ids: np.ndarray) -> np.ndarray:
    """Return the model's own logits of one row, float64."""
    with torch.no_grad():
        model = load_model(setting.pin).double()
        return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()


def losses_of(setting: Setting, ids: np.ndarray) -> np.ndarray:
    """Return the loss of each token but the first."""
    logs = log_softmax(logits_of(setting, ids), axis=1)
    return -logs[np.arange(len(ids) - 1), ids[1:]]


def found(setting: Setting, name: str, **scorer) -> dict[str, float]:
    return {key: row["score"] for key, row in setting.scores(name, scorer=scorer, batch_tokens=40).items()}


def test_length_is_the_number_of_tokens(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    answers = found(setting, "answer", method="length")
    assert answers == {row.example_id: row.answer_mask.sum() for row in rows_of(24, seed=1)}
    whole = found(setting, "whole", method="length", of="example", order="shortest")
    assert whole == {row.example_id: -len(row.input_ids) for row in rows_of(24, seed=1)}


def test_el2n_is_the_distance_of_the_distribution_to_the_one_hot(tmp_path: Path, monkeypatch) -> None:
    from stages.model import loss

    setting = make_setting(tmp_path)
    expected = {}
    for row in rows_of(24, seed=1):
        share = np.exp(log_softmax(logits_of(setting, row.input_ids), axis=1))
        places = np.flatnonzero(row.answer_mask[1:])
        share[places, row.input_ids[places + 1]] -= 1
        expected[row.example_id] = np.linalg.norm(share[places], axis=1).mean()
    assert found(setting, "whole", method="el2n") == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(loss, "LOGIT_BYTES", 61 * 4 * 3)  # three tokens at once
    assert found(setting, "pieces", method="el2n") == pytest.approx(expected, rel=1e-5)
    easy = found(setting, "easy", method="el2n", order="easy")
    assert easy == pytest.approx({key: -value for key, value in expected.items()}, rel=1e-5)


def explicit_ifd(setting: Setting, row: Row, first: int, of_perplexities: bool) -> float:
    """Two rows of the model's own losses; the tokens that only one of them predicts are left out."""
    ids, answer = row.input_ids, row.answer_mask
    given = losses_of(setting, ids)[answer[1:]]
    begins = ids[0] == first and not answer[0]
    alone = losses_of(setting, np.concatenate([ids[:1], ids[answer]]) if begins else ids[answer])
    given = given[len(given) - len(alone) :]
    ratio = np.exp(given.mean() - alone.mean()) if of_perplexities else given.mean() / alone.mean()
    return float(ratio)


@pytest.mark.parametrize(("method", "of_perplexities"), [("ifd_loss", False), ("ifd_ppl", True)])
def test_ifd_is_the_answers_loss_with_its_prompt_beside_without(
    tmp_path: Path, method: str, of_perplexities: bool
) -> None:
    first = 1  # Llama's bos_token_id
    rows = rows_of(20, seed=1, shortest=5)
    rows += [
        Row(f"b{row.example_id}", np.array([first, *row.input_ids]), np.array([False, *row.answer_mask]))
        for row in rows_of(20, seed=3)
    ]
    setting = make_setting(tmp_path, pool=rows)
    assert load_model(setting.pin).config.bos_token_id == first
    usable = [
        row for row in rows if row.answer_mask.sum() > 1 or (row.input_ids[0] == first and not row.answer_mask[0])
    ]
    assert len(usable) > 30
    expected = {row.example_id: explicit_ifd(setting, row, first, of_perplexities) for row in usable}
    kept = found(setting, "keep", method=method, above_one="keep")
    assert {key: value for key, value in kept.items() if value is not None} == pytest.approx(expected, rel=1e-4)
    last = found(setting, "last", method=method)
    assert any(value > 1 for value in expected.values())
    for key, value in expected.items():
        assert last[key] == pytest.approx(1 - value if value > 1 else value, rel=1e-4, abs=1e-5)


def test_an_answer_of_one_token_that_nothing_predicts_alone_is_not_scored(tmp_path: Path) -> None:
    rows = [*rows_of(6, seed=1, shortest=8), odd_row("z", [5, 6, 7], [False, False, True])]
    work, _ = make_setting(tmp_path, pool=rows).score(scorer={"method": "ifd_loss"})
    assert {row["example_id"]: row["score"] for row in work.rows("scores")}["z"] is None
    assert [row["example_id"] for row in work.rows("quarantine")] == ["z"]


def test_ifd_is_charged_both_of_its_passes(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    one, _ = setting.score("one", scorer={"method": "perplexity"})
    both, _ = setting.score("both", scorer={"method": "ifd_ppl"})
    answers = sum(int(row.answer_mask.sum()) for row in rows_of(24, seed=1))
    begun = sum(row.input_ids[0] == 1 and not row.answer_mask[0] for row in rows_of(24, seed=1))
    assert both.ledger().total.tokens == one.ledger().total.tokens + answers + begun
    assert both.ledger().total.flops > 1.2 * one.ledger().total.flops


def test_grand_is_the_norm_of_the_explicit_gradient_and_costs_a_training_pass(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    model = load_model(setting.pin).double()
    expected = {}
    for row in rows_of(24, seed=1):
        gradient, _, tokens = explicit_gradient(model, row)
        squares = sum(float(g.square().sum()) for name, g in gradient.items() if "_proj" in name)
        expected[row.example_id] = squares**0.5 / tokens
    work, _ = setting.score("token", scorer={"method": "grand"}, batch_tokens=40)
    rows = {row["example_id"]: row for row in work.rows("scores")}
    assert {key: row["score"] for key, row in rows.items()} == pytest.approx(expected, rel=1e-4)
    summed = found(setting, "visit", method="grand", per="visit", order="easy")
    counts = {row.example_id: int(row.answer_mask[1:].sum()) for row in rows_of(24, seed=1)}
    assert summed == pytest.approx({key: -value * counts[key] for key, value in expected.items()}, rel=1e-4)
    influence, _ = setting.score("influence", scorer={"method": "influence"}, batch_tokens=40)
    target = sum(len(row.input_ids) for row in rows_of(6, seed=2))
    assert work.ledger().total.tokens == influence.ledger().total.tokens - target
    assert 0 < work.ledger().total.flops < influence.ledger().total.flops
