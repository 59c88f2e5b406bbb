"""The optimizer step against one backward pass over all documents, by hand, in float64."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from data_contracts.config import TrainConfig
from stages.model.batch import Row, collate
from stages.model.packing import collate_packed, pack
from stages.technique.noise import NoiseScale, NormPair
from stages.technique.step import load_moments, moments_of, optimizer_for, optimizer_step, trainable
from tests.stages.train.small import llama, token_columns

CLIP_OFF = 1e9


def rows_of(count: int, *, weights: list[float] | None = None) -> list[Row]:
    columns = token_columns(count, 5)
    return [
        Row(
            columns["example_id"][i],
            np.array(columns["input_ids"][i]),
            np.array(columns["answer_mask"][i]),
            1.0 if weights is None else weights[i],
        )
        for i in range(count)
    ]


def by_hand(model, rows):
    """Return (loss, gradient by name) of the weighted mean over all answer tokens, one document at a time."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        ids = torch.from_numpy(row.input_ids)[None].long()
        logits = model(input_ids=ids).logits[0, :-1].double()
        wanted = torch.from_numpy(row.answer_mask[1:])
        losses = functional.cross_entropy(logits, ids[0, 1:], reduction="none")[wanted]
        total = total + row.weight * losses.sum()
        tokens += row.weight * int(wanted.sum())
    loss = total / tokens
    names, parameters = zip(*trainable(model).items(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


class Spy(torch.optim.Optimizer):
    """Keeps the gradients it is given and changes nothing."""

    def __init__(self, model):
        super().__init__(list(trainable(model).values()), {})
        self.model, self.seen = model, {}

    def step(self):
        self.seen = {name: item.grad.clone() for name, item in trainable(self.model).items()}


def gradient(model, window, **settings):
    spy = Spy(model)
    result = optimizer_step(model, spy, window, clip=CLIP_OFF, **settings)
    return result, spy.seen


@pytest.mark.parametrize("cuts", [[10], [5, 5], [1, 2, 3, 4], [1] * 10])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.0, 1.0, 2.0]])
def test_the_accumulated_gradient_equals_that_of_the_whole_window(cuts, weights):
    model, rows = llama(dtype=torch.float64), rows_of(10, weights=weights)
    loss, expected = by_hand(model, rows)
    window = [collate(rows[start:stop]) for start, stop in pairwise(np.cumsum([0, *cuts]))]
    result, found = gradient(model, window)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert result.gradient_norm == pytest.approx(norm, rel=1e-12)


def test_two_ranks_with_unequal_shares_give_the_gradient_of_the_whole_window():
    model, rows = llama(dtype=torch.float64), rows_of(7)
    _, expected = by_hand(model, rows)
    shares = [[collate(rows[:3])], [collate(rows[3:5]), collate(rows[5:])]]
    sent: list[list[torch.Tensor]] = []

    for share in shares:  # what each rank would send
        gradient(copy.deepcopy(model), share, all_reduce=lambda items: sent.append([item.clone() for item in items]))

    def all_reduce(items):
        for place, item in enumerate(items):
            item.copy_(sent[0][place] + sent[1][place])

    for share in (*shares, []):  # a rank without a share gets the same too
        result, found = gradient(copy.deepcopy(model), share, all_reduce=all_reduce)
        assert result.norms is not None
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)


def test_packed_documents_have_the_losses_and_the_gradient_they_have_alone():
    model, rows = llama(dtype=torch.float64), rows_of(10)
    alone, expected = gradient(model, [collate([row]) for row in rows])
    groups = pack(rows, 40)
    assert len(groups) < len(rows)
    packed, found = gradient(model, [collate_packed([[rows[i] for i in group] for group in groups])])
    order = [i for group in groups for i in group]
    torch.testing.assert_close(packed.document_loss_D, alone.document_loss_D[order], rtol=1e-10, atol=1e-12)
    assert packed.document_tokens_D.tolist() == alone.document_tokens_D[order].tolist()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-13)


def test_the_gradient_is_clipped_to_the_norm_asked_for():
    model, window = llama(dtype=torch.float64), [collate(rows_of(4))]
    _, free = gradient(model, window)
    spy = Spy(model)
    result = optimizer_step(model, spy, window, clip=result_norm(free) / 3)
    assert result.gradient_norm == pytest.approx(result_norm(free), rel=1e-12)
    assert result_norm(spy.seen) == pytest.approx(result.gradient_norm / 3, rel=1e-4)  # torch's own 1e-6 in the divisor


def result_norm(gradients):
    return math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))


def test_a_step_equals_torchs_own_adamw_on_the_mean_loss():
    ours, theirs, rows = llama(seed=1), llama(seed=1), rows_of(6)
    config = TrainConfig(weight_decay=0.0)
    optimizer = optimizer_for(ours, config, 1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        optimizer_step(ours, optimizer, [collate(rows[:2]), collate(rows[2:])], clip=1.0)
        _, grads = by_hand(theirs, rows)
        for name, item in trainable(theirs).items():
            item.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
    for name, item in trainable(theirs).items():
        torch.testing.assert_close(trainable(ours)[name], item, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_says_so(broken):
    model = llama()
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    window = [collate(rows_of(4))]
    optimizer_step(model, optimizer, window, clip=1.0)
    before = {name: item.detach().clone() for name, item in trainable(model).items()}
    moments = {name: (a.clone(), b.clone()) for name, (a, b) in moments_of(optimizer, model).items()}
    handle = model.model.norm.register_forward_hook(lambda module, args, out: out * broken)
    result = optimizer_step(model, optimizer, window, clip=1.0)
    handle.remove()
    assert not result.applied
    assert not math.isfinite(result.loss_sum)
    for name, item in trainable(model).items():
        assert torch.equal(item, before[name])
        assert all(torch.equal(a, b) for a, b in zip(moments_of(optimizer, model)[name], moments[name], strict=True))
    assert optimizer_step(model, optimizer, window, clip=1.0).applied


def test_a_window_in_which_no_token_counts_is_not_applied():
    model = llama()
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    result = optimizer_step(model, optimizer, [collate(rows_of(2, weights=[0.0, 0.0]))], clip=1.0)
    assert not result.applied
    assert result.loss is None


def test_moments_survive_a_round_trip_and_the_next_step_is_the_same():
    first, rows = llama(seed=2), [collate(rows_of(4))]
    config = TrainConfig()
    optimizer = optimizer_for(first, config, 1e-2)
    for _ in range(2):
        optimizer_step(first, optimizer, rows, clip=1.0)
    second = copy.deepcopy(first)
    other = optimizer_for(second, config, 1e-2)
    held = {name: (a.clone(), b.clone()) for name, (a, b) in moments_of(optimizer, first).items()}
    load_moments(other, second, held, 2)
    optimizer_step(first, optimizer, rows, clip=1.0)
    optimizer_step(second, other, rows, clip=1.0)
    for name, item in trainable(first).items():
        assert torch.equal(item, trainable(second)[name])


def test_vectors_do_not_decay():
    model = llama()
    groups = optimizer_for(model, TrainConfig(weight_decay=0.1), 1e-3).param_groups
    decays = {id(item): group["weight_decay"] for group in groups for item in group["params"]}
    assert all(decays[id(item)] == (0.1 if item.ndim >= 2 else 0.0) for item in model.parameters())
    assert len(decays) == len(list(model.parameters()))


def test_bfloat16_keeps_parameters_and_gradients_in_float32_and_the_loss_near():
    model, window = llama(), [collate(rows_of(4))]
    exact, _ = gradient(model, window)
    rough, grads = gradient(model, window, precision="bfloat16")
    assert all(item.dtype == torch.float32 for item in (*grads.values(), *model.parameters()))
    assert rough.loss == pytest.approx(exact.loss, rel=2e-2)
    assert rough.loss != exact.loss


def test_the_noise_scale_of_known_noise_is_found():
    rng = np.random.default_rng(0)
    mean, sigma, sizes = np.full(50, 0.3), 2.0, [8, 8, 24, 40]
    scale, one = NoiseScale(), []
    for _ in range(4000):
        grads = [mean + sigma * rng.standard_normal(50) / math.sqrt(size) for size in sizes]
        whole = sum(size * grad for size, grad in zip(sizes, grads, strict=True)) / sum(sizes)
        pair = NormPair(
            float(np.mean([grad @ grad for grad in grads])),
            float(np.mean([1 / size for size in sizes])),
            float(whole @ whole),
            1 / sum(sizes),
        )
        scale.update(pair)
        one.append((scale.trace, scale.square))
    trace, square = np.mean(one[100:], axis=0)
    assert trace == pytest.approx(sigma**2 * 50, rel=0.05)
    assert square == pytest.approx(float(mean @ mean), rel=0.05)
    assert NoiseScale.of(scale.state()).value == scale.value


def test_the_norms_of_a_window_are_those_of_its_micro_batches():
    model, rows = llama(dtype=torch.float64), rows_of(6)
    parts = [rows[:1], rows[1:6]]
    squares, tokens = [], []
    for part in parts:
        _, grads = by_hand(model, part)
        squares.append(result_norm(grads) ** 2)
        tokens.append(sum(int(row.answer_mask[1:].sum()) for row in part))
    result, _ = gradient(model, [collate(part) for part in parts])
    assert result.norms is not None
    assert result.norms.small == pytest.approx(np.mean(squares), rel=1e-10)
    assert result.norms.inverse_small == pytest.approx(np.mean([1 / n for n in tokens]), rel=1e-12)
    assert result.norms.inverse_large == pytest.approx(1 / sum(tokens), rel=1e-12)
    assert gradient(model, [collate(rows)])[0].norms is None
