"""Blocks of a decoder that learn apart: where one ends, its own loss is passed backward and the graph is cut.

A block's own loss is that of a head (norm, linear to a quarter, GELU, linear back) which rebuilds the block's detached
input from its output. Of a document it is the mean over its tokens of the mean square missed, times its answer tokens
and weight, so that a window's gradient does not depend on how it is cut into micro-batches. The cut stands before a
block's first layer, outside of what is computed again for it.
Shapes: B rows, T positions, H hidden size, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.model.loss import plain
from stages.technique.blocks import layers_of, outer_blocks
from stages.technique.optimizer import Adam, How, set_rate
from stages.technique.step import States, StepResult, optimizer_step

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

HEADS, HEAD = "local_heads", "head."
"""The heads' name in the model, and before their tensors' names beside a checkpoint."""


class Heads(nn.ModuleList):
    """Heads of a model that its own state does not hold: what is saved of it is the plain model."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return `destination` as it is."""
        return {} if destination is None else destination


def add_heads(model: nn.Module, blocks: int) -> None:
    """Give `model` a head for each block but the last."""
    like = next(model.parameters())
    size = plain(model).config.hidden_size
    inner = max(1, size // 4)
    made = [
        nn.Sequential(nn.LayerNorm(size), nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))
        for _ in range(blocks - 1)
    ]
    model.add_module(HEADS, Heads(made).to(like.device, like.dtype))


def drop_heads(model: nn.Module) -> None:
    """Take the heads away."""
    delattr(model, HEADS)


def head_size(hidden: int) -> int:
    """Return the numbers of a head."""
    inner = max(1, hidden // 4)
    return 2 * hidden + (hidden + 1) * inner + (inner + 1) * hidden


class LocalAdam(Adam):
    """AdamW over a model and its heads; each block is passed backward before the next is passed forward.

    Args:
        model: with heads.
        train, rate, states: AdamW's settings.
        weight: of the mean of the blocks' own losses.
        share: of the rate, at which what these losses alone reach moves: the layers of all blocks but the last, and
            the embedding where the head has a weight of its own. The heads move at the rate itself.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, rate: float, states: States, *, weight: float, share: float
    ) -> None:
        super().__init__(model, train, rate, states)
        self.heads, self._weight = list(getattr(model, HEADS)), weight
        layers, blocks = layers_of(model), len(self.heads) + 1
        self._starts = [len(layers) * block // blocks for block in range(blocks)]
        self._stack: nn.ModuleList = model.get_submodule(layers[0][0].rpartition(".")[0])  # type: ignore[assignment]
        head = {id(item) for item in plain(model).get_output_embeddings().parameters()}
        below = [*outer_blocks(model)[0].values(), *self._stack[: self._starts[-1]].parameters()]
        _apart(self.adamw, {id(item) for item in below} - head, share)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step; no noise scale is read, since a tied weight's gradient comes in two parts."""
        set_rate(self.adamw, rate)
        result = replace(optimizer_step(self.model, self.adamw, window, within=self.apart, **how), norms=None)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    @contextmanager
    def apart(self, batch: TokenBatch) -> Iterator[None]:
        """Cut the decoder into its blocks for a forward pass over `batch`, in which all but the last learn."""
        cut = _Cut(self.heads, batch, self._weight / len(self.heads))
        own = {start: self._stack[start] for start in self._starts}
        try:
            for start, layer in own.items():
                self._stack[start] = _Entered(layer, cut)
            yield
        finally:
            for start, layer in own.items():
                self._stack[start] = layer

    def tensors(self) -> dict[str, Tensor]:
        """Add the heads, which a checkpoint of the model leaves out; a snapshot has them among the weights."""
        heads = getattr(self.model, HEADS).named_parameters()
        return super().tensors() | {f"{HEAD}{name}": item.detach() for name, item in heads}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the moments over, and the heads where they are among the tensors."""
        super().restore(plain, {name: value for name, value in tensors.items() if not name.startswith(HEAD)})
        with torch.no_grad():
            for name, item in getattr(self.model, HEADS).named_parameters():
                item.copy_(tensors.get(f"{HEAD}{name}", item))

    def price(self, window: int) -> FlopModel:
        """Return the passes of plain training and the heads', which all tokens go through."""
        if self._priced is None:
            one = FlopModel.trace(self.model, train=True)
            assert one.body_train is not None
            lines = [layer for head in self.heads for layer in head if isinstance(layer, nn.Linear)]
            token = Fraction(6 * sum(layer.weight.numel() for layer in lines))
            constant, linear, *rest = one.body_train
            self._priced = replace(one, body_train=(constant, linear + token, *rest))
        return self._priced


def _apart(adamw: torch.optim.Optimizer, chosen: set[int], share: float) -> None:
    """Give the parameters of these ids groups of their own, with a `share` of the rate."""
    groups = []
    for options in adamw.param_groups:
        mine = [item for item in options["params"] if id(item) in chosen]
        rest = [item for item in options["params"] if id(item) not in chosen]
        groups += [{**options, "params": rest}, {**options, "params": mine, "share": share}]
    adamw.param_groups = [options for options in groups if options["params"]]


class _Cut:
    """One forward pass: what the block at hand was given, and its loss where it ends."""

    def __init__(self, heads: Sequence[nn.Module], batch: TokenBatch, share: float) -> None:
        self._heads, self._batch, self._share = iter(heads), batch, share
        self._given: Tensor | None = None

    def __call__(self, hidden_BTH: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return hidden_BTH
        if self._given is None:  # the first block keeps its graph, down to the embeddings
            self._given = hidden_BTH.detach()
            return hidden_BTH
        rebuilt_BTH = next(self._heads)(hidden_BTH)
        dtype = torch.promote_types(rebuilt_BTH.dtype, torch.float32)
        missed_BT = (rebuilt_BTH.to(dtype) - self._given.to(dtype)).square().mean(dim=-1)
        with torch.autocast(hidden_BTH.device.type, enabled=False):
            (self._share * (missed_BT.flatten() * self._worth(missed_BT))).sum().backward()
        self._given = hidden_BTH.detach()
        return self._given

    def _worth(self, like: Tensor) -> Tensor:
        """Return what the square missed at each position counts: its document's answer tokens over its tokens."""
        batch, documents = self._batch, len(self._batch.example_ids)
        owner_N = batch.document_BT.flatten()
        real_N = owner_N >= 0
        owner_N = owner_N.clamp_min(0)
        tokens_D = like.new_zeros(documents).index_add_(0, owner_N, real_N.to(like.dtype))
        answers_D = like.new_zeros(documents).index_add_(
            0, batch.answers.document_N, like.new_ones(len(batch.answers.document_N))
        )
        worth_D = batch.weights_D.to(like.dtype) * answers_D / tokens_D
        return worth_D[owner_N] * real_N


class _Entered(nn.Module):
    """A layer that a block begins with: what it is given is cut first."""

    def __init__(self, layer: nn.Module, cut: _Cut) -> None:
        super().__init__()
        self.layer = layer
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # what a decoder asks of its layers, such as their kind

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(self._cut(hidden_BTH), *args, **kwargs)
