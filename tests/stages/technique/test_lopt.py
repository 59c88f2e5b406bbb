"""LoPT against its definition in float64, one backward pass at the end; what it saves; what a checkpoint is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError
from stages.model.batch import TokenBatch, collate
from stages.model.checkpoint import load_checkpoint, save_checkpoint
from stages.model.loss import document_losses
from stages.model.packing import collate_packed
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique.optimizer import named_moments
from stages.technique.recompute import recompute
from tests.stages.technique.setting import llama, pinned, rows, started, technique, windows


def decoded(model: Any, batch: TokenBatch, layers: Any, given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return what goes in and out of some layers of the model's own decoder; None begins at the embeddings."""
    inner, kept = model.model, model.model.layers
    inner.layers = layers
    try:
        asked = {"input_ids": batch.input_ids_BT} if given is None else {"inputs_embeds": given}
        caught: list[torch.Tensor] = []
        first, last = layers[0], layers[len(layers) - 1]
        handles = [
            first.register_forward_pre_hook(lambda _, given: caught.append(given[0])),
            last.register_forward_hook(lambda *call: caught.append(call[-1])),
        ]
        found = inner(**asked, position_ids=batch.positions_BT, use_cache=False).last_hidden_state
        for handle in handles:
            handle.remove()
        return caught[0], caught[1], found
    finally:
        inner.layers = kept


def expected(model: Any, heads: Any, window: list[TokenBatch], blocks: int, weight: float) -> dict[str, torch.Tensor]:
    """Return the gradient of (losses + λ mean of the blocks' own) an answer token, from one backward pass."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    count = len(model.model.layers)
    starts = [count * block // blocks for block in range(blocks + 1)]
    for batch in window:
        given, own = None, torch.zeros((), dtype=torch.float64)
        answers = torch.bincount(batch.answers.document_N, minlength=len(batch.example_ids)).double()
        for block in range(blocks):
            entered, left, last = decoded(model, batch, model.model.layers[starts[block] : starts[block + 1]], given)
            if block == blocks - 1:
                logits = model.lm_head(last.flatten(0, 1)[batch.answers.source_N])
                losses = functional.cross_entropy(logits, batch.answers.label_N, reduction="none")
                total = total + (losses * batch.weights_D.double()[batch.answers.document_N]).sum()
                break
            missed = (heads[block](left) - entered.detach()).square().mean(dim=-1)
            for document in range(len(batch.example_ids)):
                mine = batch.document_BT == document
                own = own + batch.weights_D[document].double() * answers[document] * missed[mine].mean()
            given = left.detach()
        total = total + weight * own / (blocks - 1)
        tokens += float((answers * batch.weights_D.double()).sum())
    named = dict(model.named_parameters())
    found = torch.autograd.grad(total / tokens, list(named.values()), allow_unused=True)
    return {name: value for name, value in zip(named, found, strict=True) if value is not None}


@pytest.mark.parametrize(
    ("blocks", "packed", "recomputed"), [(2, False, ()), (3, False, (0, 2)), (2, True, ()), (4, False, (1,))]
)
def test_the_gradient_is_that_of_all_blocks_losses_with_what_is_between_them_held_fixed(
    monkeypatch: pytest.MonkeyPatch, blocks: int, packed: bool, recomputed: tuple[int, ...]
) -> None:
    method = technique("lopt", blocks=blocks, weight=3.0)
    model = method.wrap(llama(4, dtype=torch.float64)).train()
    some = rows(8)
    for number, row in enumerate(some):
        object.__setattr__(row, "weight", 0.5 + number)
    window = [collate(some[:3]), collate(some[3:])]
    if packed:
        window = [collate_packed([some[:2], some[2:4]]), collate_packed([some[4:]])]
    other = copy.deepcopy(model)
    wanted = expected(other, other.local_heads, window, blocks, 3.0)  # type: ignore[operator]
    recompute(model, recomputed)
    optimizer: Any = method.optimizer(model, TrainConfig(), 1e-3, 0)
    found: dict[str, torch.Tensor] = {}
    named = dict(model.named_parameters())
    monkeypatch.setattr(
        optimizer.adamw,
        "step",
        lambda: found.update({n: p.grad.clone() for n, p in named.items() if p.grad is not None}),
    )
    result = optimizer.step(window, 1e-3, clip=1e9)
    assert set(wanted) == set(named)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)
    norm = torch.stack([value.square().sum() for value in wanted.values()]).sum().sqrt()
    assert result.gradient_norm == pytest.approx(float(norm))
    losses = sum(float((document_losses(model, b)[0] * b.weights_D).sum()) for b in window)
    assert result.loss_sum == pytest.approx(losses)  # the blocks' own losses are not among what is shown


@pytest.mark.parametrize(("tied", "states"), [(True, "float32"), (False, "float32"), (True, "mini"), (True, "4bit")])
def test_what_the_blocks_own_losses_alone_reach_moves_at_its_share_of_the_rate(tied: bool, states: Any) -> None:
    plain = llama(5)
    if not tied:
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach().clone())
    before = {name: item.detach().clone() for name, item in plain.named_parameters()}
    moved = []
    for share in (1.0, 0.25):
        method = technique("lopt", blocks=3, local_rate=share)
        torch.manual_seed(1)
        model = method.wrap(copy.deepcopy(plain)).train()
        optimizer = method.optimizer(model, TrainConfig(), 1.0, 0, states)
        optimizer.step(windows(1)[0], 1e-2, clip=1.0)
        named = dict(model.named_parameters())
        moved.append({name: named[name].detach() - value for name, value in before.items()})
    for name, (whole, part) in {name: (moved[0][name], moved[1][name]) for name in before}.items():
        slow = any(f"layers.{layer}." in name for layer in (0, 1, 2)) or ("embed_tokens" in name and not tied)
        assert whole.abs().max() > 1e-3
        torch.testing.assert_close(part, whole * (0.25 if slow else 1.0), rtol=1e-3, atol=1e-6, msg=name)


def test_activations_are_those_of_one_block_at_a_time(tmp_path: Path) -> None:
    """The more blocks, the less is held."""
    pin = pinned(tmp_path / "model", 4, 32)

    def peak(method: str, **settings: Any) -> int:
        shape = Shape(technique(method, **settings), "float32", 32, 8, False)
        phases = Estimator(pin, TrainConfig(), "cpu").phases(shape, 7, 2)
        return max(phase.activations for phase in phases.values())

    full, two, four = peak("full"), peak("lopt"), peak("lopt", blocks=4)
    assert two < 0.62 * full
    assert four < 0.8 * two


def test_a_checkpoint_is_the_plain_model_and_the_next_segment_goes_on_with_the_heads(tmp_path: Path) -> None:
    pin, method = pinned(tmp_path / "model", 3), technique("lopt")
    optimizer = started(method, pin)
    for window in windows(2):
        optimizer.step(window, 1e-2, clip=1.0)
    trainer = {"technique": {"method": "lopt"}, "optimizer": optimizer.plain()}
    save_checkpoint(tmp_path / "saved", optimizer.model, pin, {}, trainer, optimizer.tensors())
    found = load_checkpoint(tmp_path / "saved", pin)
    plain = {name for name, _ in found.model.named_parameters()}
    assert not any("local_heads" in name for name in plain)
    torch.manual_seed(5)
    again = method.optimizer(method.wrap(found.model).train(), TrainConfig(weight_decay=0.1), 1e-2, 0)
    again.restore(trainer["optimizer"], found.state | named_moments(found.moments))  # type: ignore[arg-type]
    for one in (optimizer, again):
        one.step(windows(3)[2], 1e-2, clip=1.0)
    state = dict(again.model.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in optimizer.model.named_parameters())
    assert set(dict(method.merge(again.model).named_parameters())) == plain


def test_more_blocks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 blocks were asked for and the model has 3 layers"):
        technique("lopt", blocks=4).wrap(llama(3))
