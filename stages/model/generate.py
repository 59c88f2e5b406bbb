"""Greedy generation in batches: what a model answers to prompts of token ids.

Prompts of one length share a batch, so nothing is padded and an answer does not depend on its neighbours. A row stops
at its first stop id, which is not returned. Batching, stopping and order are decided here; text and scoring elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from data_contracts.errors import InputError
from stages.model.loss import plain


def generate(
    model: Any,
    tokenizer: Any,
    prompts_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_tokens: int,
    stop_ids: Collection[int] | None = None,
) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, in the order given.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: gives the stop id where `stop_ids` is None (its end-of-sequence token).
        prompts_ids: at least one token each.
        max_new_tokens: most tokens an answer may have, at least 1.
        batch_tokens: rows * (prompt + answer) tokens held at once; a longer single row still runs, alone.
        stop_ids: ids that end an answer.

    Raises `InputError` for an empty prompt.
    """
    if not all(len(prompt) for prompt in prompts_ids):
        raise InputError("a prompt has at least one token", "one is empty", "drop it or give it a start token")
    if stop_ids is None:
        stop_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts_ids):
        by_length.setdefault(len(prompt), []).append(index)
    answers: dict[int, list[int]] = {}
    for length, indices in sorted(by_length.items(), reverse=True):
        rows = max(1, batch_tokens // (length + max_new_tokens))
        for start in range(0, len(indices), rows):
            group = indices[start : start + rows]
            found = _greedy(plain(model), [prompts_ids[i] for i in group], max_new_tokens, frozenset(stop_ids))
            answers.update(zip(group, found, strict=True))
    return [answers[index] for index in range(len(prompts_ids))]


@torch.no_grad()
def _greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    ids_BT = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    answers: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    cache = None
    for _ in range(max_new_tokens):
        out = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        next_B = out.logits[:, -1].argmax(dim=-1)
        for row, token in enumerate(next_B.tolist()):
            if running[row] and token in stop_ids:
                running[row] = False
            elif running[row]:
                answers[row].append(token)
        if not any(running):
            break
        ids_BT = next_B[:, None]
    return answers
