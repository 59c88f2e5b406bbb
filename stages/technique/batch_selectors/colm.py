"""CoLM: medoids of every source among a step's candidates, small sources whole, weighted by the rows they stand for.

A row's features are the gradient of the last decoder layer's value projection, put through Adam:
m = β₁ m₀ + (1 − β₁) g, v = β₂ v₀ + (1 − β₂) g², u = m̂ / (√v̂ + ε), with the optimizer's own moments for m₀ and v₀. Rows
of a source are compared by L1 distance on the numbers where its mean u is largest (`stages.coreset.medoids`, as for a
whole pool). The published code estimates g from two forward passes along one random direction, the same for all rows:
they differ by one number before Adam's history is mixed in. Here it is the gradient itself, by a backward pass that
ends at that layer, below which no activations are kept. Source: Nguyen et al. 2025 (arXiv 2407.19580), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError
from stages.coreset.medoids import mean_one, medoids
from stages.technique.batch_selector import BatchSelector, Picked

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.technique.looking import Given


class Colm(BatchSelector):
    """Weighted medoids of a large batch."""

    small: float = Field(0.05, ge=0, lt=1, description="Share of the selection up to which a source is taken whole.")
    dimensions: int = Field(2560, ge=1, description="Numbers of a gradient that count in its source.")
    layer: str = Field("v_proj", description="Linear layer, of the last decoder layer, whose gradient is read.")

    def read(self, model: nn.Module) -> list[str]:
        """Return what trains in that layer: its weight, or its adapters'. Raises `ConfigError` where nothing does."""
        from stages.gradients.passes import decoder_linears
        from stages.technique.blocks import layers_of

        place = f"{layers_of(model)[-1][0]}."
        inside = {name for own in decoder_linears(model).values() for name in own.values() if name.startswith(place)}
        found = sorted(name for name in inside if self.layer in name.split(".") and name.endswith("weight"))
        if not found:
            known = sorted({name.removeprefix(place).removesuffix(".weight") for name in inside})
            raise ConfigError(
                f"`train.batch_selector.layer` of colm, {self.layer}, trains in the last decoder layer",
                f"there train {', '.join(known) or 'no linear layers'}",
                "name one of them, or train this one (`target_modules` of adapters)",
            )
        return found

    def numbers(self, sizes: Mapping[str, int]) -> int:
        """Return all of the gradient's numbers."""
        return sum(sizes.values())

    def row_flops(self, sizes: Mapping[str, int]) -> int:
        """Return what Adam's formula takes."""
        return 10 * sum(sizes.values())

    def note(self, number_dK: Tensor, name: str, gradient_dP: Tensor, given: Given) -> None:
        """Write u at the parameter's place."""
        start = 0
        for other, (before, _) in given.moments.items():
            if other == name:
                break
            start += before.numel()
        (first, second), updates = given.moments[name], given.updates + 1
        v_dP = gradient_dP.square().mul_(1 - given.beta2).add_(second.flatten(), alpha=given.beta2)
        m_dP = gradient_dP.mul_(1 - given.beta1).add_(first.flatten(), alpha=given.beta1)
        v_dP.div_(1 - given.beta2**updates).sqrt_().add_(given.epsilon)
        number_dK[:, start : start + first.numel()] = m_dP.div_(1 - given.beta1**updates).div_(v_dP)

    def choose(self, number_nK: np.ndarray, source_n: np.ndarray, share_n: np.ndarray, count: int) -> Picked:
        """Return the medoids; rows that repeat another's gradient are left out, so there may be fewer."""
        names, group_n = np.unique(source_n, return_inverse=True)
        whole_G = np.array([share_n[source_n == name][0] <= self.small for name in names])
        found = medoids(number_nK, group_n, whole_G, self.dimensions, count)
        stands_S = found.stood_for(count)
        rows = found.ranked[:count][stands_S > 0]
        order = np.argsort(rows)
        return Picked(rows[order], mean_one(stands_S[stands_S > 0])[order])
