"""Greedy generation: against transformers, one prompt at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_contracts.errors import InputError
from data_contracts.records import ModelPin
from stages.model.generate import generate
from stages.model.load import load_tokenizer

pytestmark = pytest.mark.shared
PROMPTS = ["Once upon a time", "Lily", "The dog ran", "One day, a boy", "Tom and", "A"]


def test_answers_are_those_of_each_prompt_by_itself_whatever_the_batch(pin: ModelPin, model: Any) -> None:
    tokenizer = load_tokenizer(pin)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    expected = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=20, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(ids) :].tolist())
    for batch_tokens in (1, 60, 10_000):
        found = generate(model, tokenizer, prompts, max_new_tokens=20, batch_tokens=batch_tokens, stop_ids=())
        assert found == expected


def test_an_answer_ends_before_its_first_stop_id(pin: ModelPin, model: Any) -> None:
    tokenizer = load_tokenizer(pin)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    free = generate(model, tokenizer, prompts, max_new_tokens=30, batch_tokens=500, stop_ids=())
    stop = free[0][4]
    expected = [answer[: answer.index(stop)] if stop in answer else answer for answer in free]
    assert generate(model, tokenizer, prompts, max_new_tokens=30, batch_tokens=500, stop_ids={stop}) == expected
    assert len(expected[0]) <= 4


def test_an_empty_prompt_is_refused(model: Any) -> None:
    with pytest.raises(InputError):
        generate(model, None, [[]], max_new_tokens=1, batch_tokens=10, stop_ids=())
