"""What gradient features cost: LESS's way of making them, this project's, and what quantising them loses.

Part of `benchmarks.scoring`, on the same real rows:

    less      a few examples as LESS does: one gradient at a time, TRAK's BasicProjector to 8,192 dimensions
    sketch    the same gradients through the sparse sketch to as many dimensions
    store     Adam updates of the whole pool after a short real warm-up, sketched, then kept at 16, 4, 1 bit a number:
              the artifact's bytes over those of half precision, and rank correlation of the cosines with the target's
              mean, which is not quantised

Projection errors are those of inner products between pairs of the gradients, relative to their lengths.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from stages.model.batch import Row, TokenBatch
    from stages.model.checkpoint import TrainedModel

DIMENSIONS = 8192
AT_ONCE = 16
"""LESS projects this many gradients together."""
WARM_STEPS = 16


def warm_up(model: Any, rows: list[Row]) -> TrainedModel:
    """Train `model` in place on `rows` for a few steps of eight and return it with its moments."""
    import torch

    from stages.model.batch import collate
    from stages.model.checkpoint import TrainedModel
    from stages.model.loss import document_losses

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(WARM_STEPS):
        batch = collate([rows[(8 * step + place) % len(rows)] for place in range(8)])
        loss_sum_D, answer_tokens_D = document_losses(model, batch)
        (loss_sum_D.sum() / answer_tokens_D.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = optimizer.state
    moments = {name: (state[p]["exp_avg"], state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}
    return TrainedModel(model, moments, {"updates": WARM_STEPS, "beta2": 0.999, "epsilon": 1e-8})


def features_pass(model: Any, batches: list[TokenBatch]) -> None:
    """The pool's projected and preconditioned gradients, 256 numbers a layer; what the moments are costs nothing."""
    import torch

    from stages.gradients.projection import Projection

    moments = {name: (torch.zeros_like(p), torch.rand_like(p) + 0.1) for name, p in model.named_parameters()}
    with Projection(model, moments=moments, updates=1) as projection:
        for batch in batches:
            projection.of(batch)


def projections(model: Any, rows: list[Row]) -> dict[str, Any]:
    """Make and project the gradients of `AT_ONCE` rows both ways; return seconds, peak bytes and errors."""
    import torch
    from trak.projectors import BasicProjector, ProjectionType

    from stages.gradients.sketch import SparseSketch
    from stages.meter.memory import PeakMeter
    from stages.model.batch import collate
    from stages.model.loss import document_losses

    def gradients() -> Tensor:
        found = []
        for row in rows[:AT_ONCE]:
            loss_sum_D, answer_tokens_D = document_losses(model, collate([row]))
            (loss_sum_D / answer_tokens_D).sum().backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            model.zero_grad(set_to_none=True)
        return torch.stack(found)

    with PeakMeter() as less_memory:
        began = time.process_time()
        gradient_DP = gradients()
        projector = BasicProjector(
            gradient_DP.shape[1], DIMENSIONS, 0, ProjectionType.rademacher, torch.device("cpu"), dtype=torch.float32
        )
        middle = time.process_time()
        trak_DK = projector.project(gradient_DP, 0) / DIMENSIONS**0.5
        ended = time.process_time()
    del projector
    sketch = SparseSketch(DIMENSIONS)
    times = []
    with PeakMeter() as sketch_memory:
        for _ in range(5):
            sketch_DK, at = torch.zeros(len(gradient_DP), DIMENSIONS), 0
            start = time.process_time()
            for name, parameter in model.named_parameters():
                sketch.add(sketch_DK, name, gradient_DP[:, at : at + parameter.numel()])
                at += parameter.numel()
            times.append(time.process_time() - start)
    return {
        "less_seconds": (ended - began) / len(gradient_DP),
        "trak_seconds": ended - middle,
        "sketch_seconds": statistics.median(times),
        "trak_error": _error(gradient_DP, trak_DK),
        "sketch_error": _error(gradient_DP, sketch_DK),
        "peak_bytes": {"less": less_memory.bytes, "sketch": sketch_memory.bytes},
    }


def _error(vector_DP: Tensor, found_DK: Tensor) -> float:
    """Return the root mean square over pairs of the inner product's error, over the product of lengths."""
    import torch

    exact_DP, found = vector_DP.double(), found_DK.double()
    length_D = torch.linalg.vector_norm(exact_DP, dim=1)
    off_DD = (found @ found.T - exact_DP @ exact_DP.T) / torch.outer(length_D, length_D)
    return float(off_DD[tuple(torch.triu_indices(len(off_DD), len(off_DD), 1))].square().mean().sqrt())


def store(model: Any, warm: list[Row], pool: list[TokenBatch], target: list[TokenBatch]) -> dict[str, float]:
    """Return bytes and rank correlation of each width on sketched Adam updates of the pool, `model` warmed up first."""
    from data_contracts.arrow import write_table
    from data_contracts.tables import FEATURES
    from stages.gradients.examples import ExampleGradients
    from stages.gradients.quantised import Quantiser
    from stages.gradients.sketch import SparseSketch
    from stages.score.methods.less import Checkpoint
    from stages.statistics.rank import spearman

    trained = warm_up(model, warm)
    with ExampleGradients(model) as gradients:
        less = Checkpoint(gradients, SparseSketch(DIMENSIONS), trained, 1.0, 0.9)
        feature_NK = np.concatenate([less.unit(batch, adam=True)[0].numpy() for batch in pool])
        goal_K = np.concatenate([less.unit(batch, adam=False)[0].numpy() for batch in target]).mean(axis=0)
    ids = [example_id for batch in pool for example_id in batch.example_ids]
    exact_N, found = feature_NK @ goal_K, {}
    for bits in (16, 4, 1):
        quantiser = Quantiser(DIMENSIONS, bits)
        code_NU, scale_N = quantiser.encode(feature_NK)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "features.arrow"
            columns = {
                "example_id": [f"{example_id:>032}" for example_id in ids],
                "bits": [bits] * len(ids),
                "dimensions": [DIMENSIONS] * len(ids),
                "scale": scale_N.tolist(),
                "code": [code.tobytes() for code in code_NU],
            }
            write_table(path, FEATURES.schema, columns)
            found[f"q{bits}_bytes"] = round(path.stat().st_size / (len(ids) * DIMENSIONS * 2), 4)
        found[f"q{bits}_spearman"] = round(spearman(quantiser.decode(code_NU, scale_N) @ goal_K, exact_N) or 0.0, 4)
    return found
