"""Evaluation of a tiny real model, against transformers' own loss, likelihoods and generation."""

from __future__ import annotations

import math

import pytest
import torch

from data_contracts.errors import ConfigError
from stages.evaluate.stage import STAGE, EvaluateSlice
from stages.model.load import load_model, load_tokenizer
from stages.model.tokenise import Renderer
from tests.local_work import inputs_of, work_for
from tests.stages.evaluate.holdouts import STORIES, Bundle, chat

pytestmark = pytest.mark.shared


@pytest.fixture
def bundle(tmp_path, shared):
    return Bundle(tmp_path, shared)


def evaluate(bundle, tasks, tmp_path, **models):
    work = work_for(STAGE, tmp_path / "work")
    inputs = inputs_of(
        base=bundle.artifact("base"),
        holdout=bundle.artifact("holdout"),
        holdout_tokens=bundle.artifact("holdout_tokens"),
        **models,
    )
    summary = STAGE.run(EvaluateSlice(seed=0, evaluate={"tasks": tasks}), inputs, work)
    return work.rows("evaluation"), work, summary


def reference_loss(model, ids, mask):
    """Sum of cross-entropy over the masked tokens, by the model's own logits in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    log_p = torch.log_softmax(logits, -1)
    return -sum(float(log_p[t - 1, ids[t]]) for t in range(1, len(ids)) if mask[t])


def test_base_and_candidate_losses_equal_the_models_own(bundle, tmp_path):
    bundle.write([{"messages": chat(*story)} for story in STORIES])
    candidate = bundle.checkpoint("candidate", change=0.3)
    rows, work, summary = evaluate(bundle, [{"method": "perplexity"}], tmp_path, checkpoint=candidate)
    assert [row["model"] for row in rows] == ["base"] * 5 + ["candidate"] * 5
    base = load_model(bundle.pin)
    changed = load_model(bundle.pin)
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.3)
    tokens = {row["example_id"]: row for row in bundle.artifact("holdout_tokens").table().to_pylist()}
    for row in rows:
        item = tokens[row["item_id"]]
        model = base if row["model"] == "base" else changed
        assert row["loss_sum"] == pytest.approx(reference_loss(model, item["input_ids"], item["answer_mask"]), rel=1e-4)
        assert row["answer_tokens"] == item["n_answer_tokens"]
        assert row["score"] == pytest.approx(-row["loss_sum"] / row["answer_tokens"])
    charged = work.ledger().by_cause()["eval"]
    assert charged.tokens == 2 * sum(row["n_tokens"] for row in tokens.values())
    assert "perplexity: loss of candidate" in summary.facts


def test_a_champion_that_is_the_candidate_is_asked_once(bundle, tmp_path):
    bundle.write([{"messages": chat(*story)} for story in STORIES])
    candidate = bundle.checkpoint("candidate", change=0.1)
    rows, work, _ = evaluate(bundle, [{"method": "perplexity"}], tmp_path, checkpoint=candidate, champion=candidate)
    by_model = {m: [r["loss_sum"] for r in rows if r["model"] == m] for m in ("base", "champion", "candidate")}
    assert by_model["champion"] == by_model["candidate"] != by_model["base"]
    items = bundle.artifact("holdout_tokens").table().column("n_tokens").to_pylist()
    assert work.ledger().by_cause()["eval"].tokens == 2 * sum(items)


def test_a_choice_is_made_by_the_likelihood_of_its_tokens(bundle, tmp_path):
    choices = ["A small blue car.", "A sky.", "An extraordinarily unlikely xylophone."]
    bundle.write(
        [
            {"messages": chat("What is in the box?", choices[0]), "extra": {"choices": choices}},
            {"messages": chat("Who is sad?", "The cat."), "extra": {"choices": ["A dog.", "A tree."]}},
            {"messages": chat("Is it big?", "Yes."), "extra": {"choices": ["Yes.", "Yes."]}},
            {"messages": chat("Tell me about Tom.", "Tom had a red ball.")},
        ]
    )
    rows, _, _ = evaluate(
        bundle,
        [{"method": "multiple_choice", "by": "sum"}, {"method": "multiple_choice", "suite": "mc_byte"}],
        tmp_path,
    )
    plain = {row["note"]: row for row in rows if row["suite"] == "multiple_choice"}
    assert len(plain) == 3  # the row without choices is not asked
    assert plain["the answer is none of the choices"]["score"] is None
    assert plain["`choices` is no list of at least two different texts"]["score"] is None
    asked = next(row for row in plain.values() if row["score"] is not None)
    model, renderer = load_model(bundle.pin), Renderer(load_tokenizer(bundle.pin))
    expected = []
    for choice in choices:
        made = renderer.render(chat("What is in the box?", choice))
        expected.append(-reference_loss(model, made.ids, made.answer_mask))
    assert asked["log_likelihoods"] == pytest.approx(expected, rel=1e-4)
    best = max(range(3), key=lambda i: expected[i])
    assert (asked["prediction"], asked["score"]) == (choices[best], float(best == 0))
    by_byte = next(row for row in rows if row["suite"] == "mc_byte" and row["score"] is not None)
    best = max(range(3), key=lambda i: expected[i] / len(choices[i].encode()))
    assert (by_byte["prediction"], by_byte["score"]) == (choices[best], float(best == 0))


def test_generated_answers_are_marked_and_what_was_read_is_kept(bundle, tmp_path):
    model, tokenizer = load_model(bundle.pin), load_tokenizer(bundle.pin)
    prompt = "Once upon a time"
    ids = Renderer(tokenizer).render(chat(prompt, "x"))
    start = ids.ids[: ids.answer_mask.index(True)]
    made = model.generate(torch.tensor([start]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(start) :]
    said = tokenizer.decode(made, skip_special_tokens=True)
    bundle.write([{"messages": chat(prompt, said)}, {"messages": chat("Tell me about Tom.", "12")}])
    tasks = [
        {"method": "exact_match", "max_new_tokens": 8},
        {"method": "exact_match", "suite": "number", "metric": "final-number", "max_new_tokens": 8},
    ]
    rows, work, _ = evaluate(bundle, [*tasks, {"method": "perplexity"}], tmp_path)
    charged, items = work.ledger().by_cause(), bundle.artifact("holdout_tokens").table().to_pylist()
    assert charged["eval"].tokens == sum(item["n_tokens"] for item in items)  # losses alone
    other = Renderer(tokenizer).render(chat("Tell me about Tom.", "12"))
    passed = len(start) + other.answer_mask.index(True) + 2 * (8 - 1)  # neither answer stops before its eighth token
    assert charged["infer"].tokens == len(tasks) * passed
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters < charged["infer"].flops / charged["infer"].tokens < 4 * parameters
    assert charged["infer"].seconds > 0
    text = {row["prediction"]: row for row in rows if row["suite"] == "exact_match"}
    assert text[said]["score"] == 1.0
    number = sorted((r for r in rows if r["suite"] == "number"), key=lambda r: r["score"] is None)
    assert (number[0]["score"], number[0]["extracted"], number[0]["note"]) == (0.0, None, "nothing extracted")
    assert (number[1]["score"], "reference" in number[1]["note"]) == (None, True)


def test_a_prompt_without_room_for_an_answer_has_no_score(bundle, tmp_path):
    bundle.write([{"messages": chat("Who?", "Tom.")}])
    rows, _, _ = evaluate(bundle, [{"method": "exact_match", "max_new_tokens": 100_000}], tmp_path)
    assert [(row["score"], "positions" in row["note"]) for row in rows] == [(None, True)]


def test_two_suites_of_one_name_are_refused_before_a_model_is_loaded(bundle, tmp_path):
    bundle.write([{"messages": chat(*STORIES[0])}])
    with pytest.raises(ConfigError, match="suite name"):
        evaluate(bundle, [{"method": "exact_match"}, {"method": "exact_match"}], tmp_path)


def test_a_suite_that_suits_no_item_says_so_and_counts_no_zero(bundle, tmp_path):
    bundle.write([{"messages": chat(*STORIES[0])}])
    rows, work, _ = evaluate(bundle, [{"method": "multiple_choice"}], tmp_path)
    assert rows == []
    assert any("multiple_choice" in notice for notice in work.notices)


def test_a_broken_model_leaves_losses_that_are_not_finite_for_the_gates(bundle, tmp_path):
    bundle.write([{"messages": chat(*story)} for story in STORIES])
    broken = bundle.checkpoint("broken", change=0.0, broken_token=300)
    rows, _, summary = evaluate(bundle, [{"method": "perplexity"}], tmp_path, checkpoint=broken)
    overflown = [row for row in rows if row["model"] == "candidate" and not math.isfinite(row["loss_sum"])]
    assert overflown
    assert {row["note"] for row in overflown} == {"the loss is not finite"}
    assert all(math.isfinite(row["loss_sum"]) for row in rows if row["model"] == "base")
    assert summary.facts["perplexity: loss of candidate"] in ("nan", "inf")
