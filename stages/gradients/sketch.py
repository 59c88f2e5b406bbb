"""A sparse random sketch of whole gradients: K numbers that keep inner products, at a few operations a coordinate.

Every coordinate goes, with a random sign, to one place in each of s parts of the sketch (a sparse Johnson-Lindenstrauss
map, Kane & Nelson 2014). Coordinates are taken in runs of m = K / s; a run is shifted cyclically as a whole, by a
random amount, so that placing it is two vector additions and the only tables are signs, made again when needed. Two
coordinates of different runs meet with probability 1 / m, two of one run never, and signs are independent; hence
E⟨Sx, Sy⟩ = ⟨x, y⟩ and Var = Σ (x_i² y_j² + x_i y_i x_j y_j) / K over i, j of different runs: at most the
(‖x‖²‖y‖² + ⟨x, y⟩² − 2 Σ x_i² y_i²) / K of a dense sign matrix. More parts make a few heavy coordinates less of a risk.
Shapes: D examples, P coordinates of one parameter, K numbers of a sketch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from stages.gradients.examples import ExampleGradients
from stages.model.batch import TokenBatch

Change = Callable[[str, slice, Tensor], Tensor]
"""From a parameter's name, some documents and their gradient_dP of the summed loss to what is sketched of them."""


class SparseSketch:
    """The map; a function of seed, parameter names and their sizes alone.

    Args:
        dimensions: K, a multiple of `parts`.
        parts: s, the non-zeros a coordinate.
        seed: of all signs and shifts.
    """

    def __init__(self, dimensions: int = 8192, *, parts: int = 2, seed: int = 0) -> None:
        if parts < 1 or dimensions < parts or dimensions % parts:
            raise ValueError(f"a sketch of {dimensions} numbers has no {parts} equal parts")
        self.dimensions, self.parts, self.seed = dimensions, parts, seed
        self.run = dimensions // parts

    def flops(self, coordinates: int) -> int:
        """Operations that one vector takes: a multiplication and an addition a coordinate and part."""
        return 2 * self.parts * coordinates

    def add(self, sketch_DK: Tensor, name: str, values_DP: Tensor) -> None:
        """Add the sketch of parameter `name`'s part of D vectors to `sketch_DK`, in place."""
        size = values_DP.shape[1]
        run = self.run
        for part in range(self.parts):
            shift_C, sign_P = self.draw(name, size, part)
            sign_P = sign_P.to(sketch_DK)
            out_Dm = sketch_DK[:, part * run : (part + 1) * run]
            for start, shift in zip(range(0, size, run), shift_C.tolist(), strict=True):
                middle, end = min(size, start + run - shift), min(size, start + run)
                head, tail = slice(start, middle), slice(middle, end)
                out_Dm[:, shift : shift + middle - start].addcmul_(values_DP[:, head], sign_P[head])
                if end > middle:
                    out_Dm[:, : end - middle].addcmul_(values_DP[:, tail], sign_P[tail])

    def of(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return sketch_K of one vector given by parameter name (a target's gradient); in at least float32."""
        some = next(iter(gradient.values()))
        sketch_1K = torch.zeros(
            1, self.dimensions, dtype=torch.promote_types(some.dtype, torch.float32), device=some.device
        )
        for name, value in gradient.items():
            self.add(sketch_1K, name, value.reshape(1, -1).to(sketch_1K.dtype))
        return sketch_1K[0]

    def draw(self, name: str, size: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the shift of each run and the sign of each coordinate (±1/√s, float32) in one part.

        Coordinate p of run c is at place (p + shift_c) mod m of the part.
        """
        words = f"{self.seed}/{name}/{part}"
        random = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(words.encode()).digest())))
        shift_C = random.integers(0, self.run, -(-size // self.run))
        bits_P = np.unpackbits(np.frombuffer(random.bytes(-(-size // 8)), dtype=np.uint8), count=size)
        root = np.float32(self.parts**-0.5)
        return torch.from_numpy(shift_C), torch.from_numpy(np.where(bits_P, root, -root))


def sketched(
    gradients: ExampleGradients, sketch: SparseSketch, batch: TokenBatch, change: Change
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sketch_DK of each document's gradient after `change`, loss_sum_D and answer_tokens_D."""
    found: list[Tensor] = []

    def take(name: str, some: slice, gradient_dP: Tensor) -> None:
        if not found:
            found.append(gradient_dP.new_zeros(len(batch.example_ids), sketch.dimensions))
        sketch.add(found[0][some], name, change(name, some, gradient_dP))

    loss_sum_D, answer_tokens_D = gradients.of(batch, take)
    none_DK = loss_sum_D.new_zeros(len(batch.example_ids), sketch.dimensions)
    return (found[0] if found else none_DK), loss_sum_D, answer_tokens_D
