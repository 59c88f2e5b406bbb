"""Differences of losses with no weight touched: a branch beside each adapter moves, ± in two slots of one batch.

(W + εd) x = W x + ε d x, so a linear layer that trains is moved by adding ε d x to what it returns, +ε for the first
half of a doubled batch and −ε for the second: one forward pass gives both sides, and the frozen weights around it may
be quantised, shared or read-only. For LoRA d is as thin as the adapter, so the branch costs what the adapter does.
What a difference is, its step and its error: `differences.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from data_contracts.errors import ModelError
from stages.gradients.differences import Differences
from stages.gradients.taps import owners
from stages.model.batch import TokenBatch


class Branches(Differences):
    """`Differences` of a model all of whose directions are of adapters' linear layers (see `differences_of`)."""

    def _keep(self) -> None:
        self._owners = owners(self.model, self.directions)
        self._met: set[nn.Module] = set()
        self._branch_flops = sum(2 * direction[0].numel() for direction in self.directions.values())

    def extra_flops(self, batch: TokenBatch) -> int:
        """Return the operations of the branches."""
        sides = self.passes - (not self.central)
        return sides * batch.shape[0] * batch.shape[1] * self._branch_flops

    def _both(self, batch: TokenBatch, group: int, epsilon: float) -> tuple[Tensor, Tensor]:
        sides_N = self._branched(doubled(batch), group, epsilon, batch.shape[0])
        ahead_N, behind_N = sides_N.chunk(2)
        return ahead_N, behind_N

    def _moved_losses(self, batch: TokenBatch, group: int, epsilon: float) -> Tensor:
        return self._branched(batch, group, epsilon, batch.shape[0])

    def _branched(self, batch: TokenBatch, group: int, epsilon: float, rows: int) -> Tensor:
        """Return the losses of a batch whose first `rows` rows are at θ + εd and all after at θ − εd."""
        device = batch.input_ids_BT.device
        step_B = torch.full((batch.shape[0], 1, 1), epsilon, dtype=torch.float64, device=device)
        step_B[rows:] *= -1
        with self._beside(group, step_B, batch.shape):
            losses_N = self._losses(batch)
        missed = [next(iter(own.values())) for module, own in self._owners.items() if module not in self._met]
        if missed and len(batch.answers.label_N):
            raise ModelError(
                "an adapter acts through the linear layer that owns it",
                f"{len(missed)} did not, the first is {missed[0]}",
                "score with `influence`",
            )
        return losses_N

    @contextmanager
    def _beside(self, group: int, step_B: Tensor, shape: tuple[int, int]) -> Iterator[None]:
        def branch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self._met.add(module)
            own, given = self._owners[module], args[0]
            if given.shape[:-1] != shape:
                raise ModelError(
                    "an adapter sees one row a token",
                    f"it sees rows of shape {tuple(given.shape[:-1])} in a batch of {shape[0]} x {shape[1]}",
                    "score with `influence`",
                )
            moved = {name: self.directions[full][group].to(given.dtype) for name, full in own.items()}
            return output + step_B.to(output.dtype) * functional.linear(given, moved["weight"], moved.get("bias"))

        self._met = set()
        handles = [module.register_forward_hook(branch) for module in self._owners]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def doubled(batch: TokenBatch) -> TokenBatch:
    """Return the batch's rows twice, the second time as documents of their own."""
    documents = len(batch.example_ids)
    later = torch.where(batch.document_BT < 0, batch.document_BT, batch.document_BT + documents)
    return replace(
        batch,
        input_ids_BT=batch.input_ids_BT.repeat(2, 1),
        answer_BT=batch.answer_BT.repeat(2, 1),
        attention_BT=batch.attention_BT.repeat(2, 1),
        positions_BT=batch.positions_BT.repeat(2, 1),
        document_BT=torch.cat([batch.document_BT, later]),
        example_ids=batch.example_ids * 2,
        weights_D=batch.weights_D.repeat(2),
        _answers=[],
    )


def differences_of(
    model: Any, directions: Mapping[str, Tensor], autocast: torch.dtype | None, *, central: bool
) -> Differences:
    """Return `Branches` where all that moves are linear layers of LoRA adapters, else `Differences`."""
    kind: type[Differences] = Differences
    if hasattr(model, "peft_config"):
        owned = owners(model, directions)
        if all(_is_adapter(module, own) for module, own in owned.items()):
            kind = Branches
    return kind(model, dict(directions), autocast, central=central)


def _is_adapter(module: nn.Module, own: Mapping[str, str]) -> bool:
    linear = type(module).forward is nn.Linear.forward
    return linear and "weight" in own and all(".lora_" in name for name in own.values())
