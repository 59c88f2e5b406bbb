"""Gradient features: every example's gradient in a few numbers a layer, the parameter-sized gradient never formed.

A linear layer's gradient Σ_t b_t a_tᵀ is projected from both sides before the outer product, Σ_t (P b_t)(Q a_t)ᵀ with
P (k_out x o) and Q (k_in x i): T·(i·k_in + o·k_out + k_in·k_out) operations for T·i·o (LoGra, Choe et al. 2024).
P and Q have orthogonal random rows with E[PᵀP] = I, so products of features are unbiased; a side that is not wider than
its k is kept as it is. Adam's preconditioner D is folded in: with v ≈ r cᵀ / Σr (Adafactor, Shazeer & Stern 2018) the
scale S = √D splits into a factor a side, and ⟨feature, feature⟩ estimates ⟨S gᵢ, S gₖ⟩ ≈ ⟨gᵢ, D gₖ⟩.
The *dual* projection divides by S instead: ⟨feature, dual(d)⟩ estimates ⟨gᵢ, d⟩ for any d without the rank-1 error, so
a stored feature can be asked about D Ḡ of a later checkpoint, D exact; S then only keeps the variance low.
Shapes: D documents (one a row), K numbers of a feature, i and o a layer's inputs and outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stages.gradients.passes import TappedPass, decoder_linears, rows_a_document
from stages.gradients.precondition import denominator
from stages.gradients.taps import Call
from stages.model.batch import TokenBatch

Moments = Mapping[str, tuple[Tensor, Tensor]]
"""(exp_avg, exp_avg_sq) by parameter name, as a checkpoint holds them."""


@dataclass(frozen=True)
class Side:
    """One side of a layer: its scale (factor of S; zero where there never was a gradient) and its projection.

    `scale_n` has the side's size; `matrix_kn` is None for the identity.
    """

    scale_n: Tensor
    matrix_kn: Tensor | None

    @property
    def size(self) -> int:
        """Numbers left of the side."""
        return len(self.scale_n) if self.matrix_kn is None else len(self.matrix_kn)

    def folded(self, *, dual: bool) -> Tensor | None:
        """Return matrix · diag(scale), or with 1 / scale; of the identity only the diagonal, None where that is 1."""
        scale_n = torch.where(self.scale_n > 0, 1 / self.scale_n, 0.0) if dual else self.scale_n
        if self.matrix_kn is not None:
            return self.matrix_kn * scale_n
        return None if bool((scale_n == 1).all()) else scale_n


class Projection(TappedPass):
    """A context that gives the projected, preconditioned gradient of each document over the decoder's linear layers.

    Args:
        model: evaluated as it is (call `eval()` first); parameters with `requires_grad` count.
        per_layer: (k_in, k_out); a layer's weight gets k_in · k_out numbers, its bias k_out.
        seed: the projections depend on it, a layer's name and its sizes alone.
        moments: Adam's; None leaves gradients as they are (S = 1). `updates`, `beta2`, `epsilon` as for `precondition`.
        autocast: dtype of the forward pass; projections are in at least float32.

    `dimensions` is K, `parameters` names what counts in the order of a feature's parts. Raises `ModelError` where no
    linear layer trains, `ArtifactError` where the moments are of another parameterisation.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        per_layer: tuple[int, int] = (16, 16),
        seed: int = 0,
        moments: Moments | None = None,
        updates: int = 1,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._owners = decoder_linears(model)
        super().__init__(model, self._owners, autocast=autocast)
        named = dict(model.named_parameters())
        self.parameters: list[str] = []
        self._sides: dict[str, tuple[Side, ...]] = {}
        self._across: set[str] = set()
        """Weights stored (inputs, outputs)."""
        for module, own in self._owners.items():
            for attribute, name in sorted(own.items(), reverse=True):  # weight, then bias
                if name in self._sides:
                    continue
                value = named[name].detach()
                if type(module).forward is Conv1D.forward and attribute == "weight":
                    self._across.add(name)
                value = value.to(torch.promote_types(value.dtype, torch.float32))
                if moments is None:
                    scales = tuple(value.new_ones(size) for size in self._upright(name, value).shape)
                else:
                    root = denominator(name, value, moments, updates, beta2=beta2, epsilon=epsilon)
                    scales = _split(self._upright(name, root))
                self._sides[name] = tuple(
                    Side(scale_n, _rows(k, scale_n, f"{seed}/{name}/{axis}"))
                    for axis, (k, scale_n) in enumerate(zip(per_layer[::-1], scales, strict=False))
                )
                self.parameters.append(name)
        self._near, self._dual = (
            {name: tuple(side.folded(dual=dual) for side in sides) for name, sides in self._sides.items()}
            for dual in (False, True)
        )
        sizes = [math.prod(side.size for side in self._sides[name]) for name in self.parameters]
        self.dimensions = sum(sizes)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._columns = {n: slice(e - s, e) for n, s, e in zip(self.parameters, sizes, ends, strict=True)}

    def of(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return feature_DK (of the gradient of the *summed* answer loss), loss_sum_D and answer_tokens_D.

        One forward and backward pass. float32, or float64 for a float64 model. Raises `ModelError` where a layer sees
        other rows than the batch's tokens. A layer that is called twice adds up.
        """
        loss_sum_D, answer_tokens_D = self._pass(batch)
        return self.feature_DK, loss_sum_D, answer_tokens_D

    def flops(self, rows: int, length: int) -> int:
        """Return the operations of projecting a batch, beyond those of its forward and backward pass."""
        total = 0
        for sides in self._sides.values():
            kept = math.prod(side.size for side in sides)
            projected = sum(0 if side.matrix_kn is None else side.matrix_kn.numel() for side in sides)
            total += 2 * rows * length * (projected + (kept if len(sides) > 1 else 0))
        return total

    def project(self, gradient: Mapping[str, Tensor], *, dual: bool = False) -> Tensor:
        """Return feature_K of a gradient given by parameter name, with the projections that `of` uses.

        Args:
            gradient: as a mean over a target has it; names outside `parameters` take no part, one that is absent is 0.
            dual: divide by S rather than multiply: for a direction d = D Ḡ that is already preconditioned.
        """
        folded = self._dual if dual else self._near
        parts = []
        for name in self.parameters:
            sides = self._sides[name]
            if name not in gradient:
                parts.append(sides[0].scale_n.new_zeros(math.prod(side.size for side in sides)))
                continue
            value = self._upright(name, gradient[name].to(sides[0].scale_n.dtype))
            if len(sides) > 1:
                value = _apply(folded[name][0], _apply(folded[name][1], value).T).T
            else:
                value = _apply(folded[name][0], value)
            parts.append(value.flatten())
        return torch.cat(parts)

    def _begin(self, batch: TokenBatch) -> None:
        assert not batch.packed, "features need one document a row"
        self._shape = batch.shape
        scale = next(iter(self._sides.values()))[0].scale_n
        self.feature_DK = scale.new_zeros(len(batch.example_ids), self.dimensions)
        """Of the latest pass."""

    def _visit(self, call: Call) -> None:
        for attribute, name in self._owners[call.module].items():
            given_DTi, gradient_DTo = rows_a_document(call, self._shape, name)
            left = _apply(self._near[name][0], gradient_DTo.to(self.feature_DK.dtype))
            if attribute == "weight":
                right = _apply(self._near[name][1], given_DTi.to(self.feature_DK.dtype))
                part_DK = torch.bmm(left.mT, right).flatten(1)
            else:
                part_DK = left.sum(dim=1)
            self.feature_DK[:, self._columns[name]] += part_DK

    def _upright(self, name: str, value: Tensor) -> Tensor:
        """Return a weight as (outputs, inputs)."""
        return value.T if name in self._across else value


def rank_one(value_oi: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row_o, column_i) with value ≈ row columnᵀ: row and column sums, as Adafactor keeps them."""
    total = value_oi.sum()
    if not bool(total > 0):
        return value_oi.new_zeros(value_oi.shape[0]), value_oi.new_zeros(value_oi.shape[1])
    root = total.sqrt()
    return value_oi.sum(dim=1) / root, value_oi.sum(dim=0) / root


def _split(root: Tensor) -> tuple[Tensor, ...]:
    """Return the factors of S = 1 / √root: of a weight one a side, of a vector its own; 0 where infinite.

    The squares (√v̂ + ε)² are factored, so that ε has its part in them.
    """
    if root.dim() == 1:
        return (root.rsqrt(),)
    squares = root.square().masked_fill(root.isinf(), 0.0)
    return tuple(torch.where(side > 0, side.pow(-0.25), 0.0) for side in rank_one(squares))


def _rows(k: int, scale_n: Tensor, words: str) -> Tensor | None:
    """Return k orthogonal random rows of norm √(n / k), so that E[PᵀP] = I; None where k ≥ n."""
    size = len(scale_n)
    if k >= size:
        return None
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1)
    columns_nk, triangle_kk = torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64))
    columns_nk = columns_nk * triangle_kk.diagonal().sign()  # uniform over such frames
    return (columns_nk.T * (size / k) ** 0.5).to(scale_n)


def _apply(folded: Tensor | None, value: Tensor) -> Tensor:
    if folded is None:
        return value
    return value * folded if folded.dim() == 1 else value @ folded.T
