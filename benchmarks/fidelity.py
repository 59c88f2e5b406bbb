"""How faithfully do scores tell what retraining without an example would do? The linear datamodeling score (LDS).

A small real model is trained on many random halves S of one pool of real rows. For each item z outside the pool, the
losses of these models are set against what scores predict: the Spearman correlation over S of Σ_{i∈S} τ_i(z) with the
negative loss of z, averaged over items (Park et al. 2023, TRAK, section 3). Every arm scores from the same checkpoints,
one an epoch of training on the whole pool, weighted by the epoch's mean learning rate (as LESS does); an arm without a
target has the same scores for every item. The peer is dattri's TRAK, averaged over the same checkpoints. Intervals are
percentile bootstraps over items and subsets; a subset that is drawn twice weighs twice.

`mislabel_auc` is benchmarks.noise_audit's. Without dattri (extra `peers`), its arm is left out and it says so.

    python -m benchmarks.fidelity [--quick] [--data FOLDER] [--audit-model FOLDER]
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

from benchmarks.chain import report
from benchmarks.noise_audit import audit
from benchmarks.options import Options
from benchmarks.scorers import scores_of
from benchmarks.scoring import read_rows

if TYPE_CHECKING:
    from stages.model.batch import Row
    from stages.model.checkpoint import TrainedModel

LONGEST, RATE, WINDOW, WARMUP = 128, 1e-3, 8, 4
ARMS = ("influence", "less", "perplexity", "el2n", "random")
PEER = {"regularisation": 1e-4}
"""Of dattri's TRAK: λ is a tenth of the mean squared feature here, the best of 1e-4 … 100 times it with exact features;
its own default, none, was worse."""
BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Size:
    """How much is done: rows of the pool, items, halves, epochs, dimensions of the peer's projection."""

    pool: int
    items: int
    halves: int
    epochs: int
    dimensions: int


FULL, QUICK = Size(256, 32, 60, 3, 2048), Size(128, 24, 40, 2, 512)


def train(base: Any, pool: list[Row], members: set[int], epochs: int) -> list[TrainedModel]:
    """Train on the members of the pool, in an order that all subsets share; return the checkpoint of each epoch."""
    from data_contracts.config import TrainConfig
    from stages.model.batch import collate
    from stages.model.checkpoint import TrainedModel
    from stages.technique.step import moments_of, optimizer_for, optimizer_step

    settings = TrainConfig(learning_rate=RATE)
    model = copy.deepcopy(base).requires_grad_(True).train()
    optimizer, found = optimizer_for(model, settings, RATE), []
    orders = [
        [i for i in np.random.default_rng(epoch).permutation(len(pool)) if i in members] for epoch in range(epochs)
    ]
    steps, step = sum(-(-len(order) // WINDOW) for order in orders), 0
    for order in orders:
        rates = []
        for at in range(0, len(order), WINDOW):
            rates.append(RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            batch = collate([pool[i] for i in order[at : at + WINDOW]])
            optimizer_step(model, optimizer, [batch], clip=settings.clip, precision="float32")
            step += 1
        moments = {name: (a.clone(), b.clone()) for name, (a, b) in moments_of(optimizer, model).items()}
        trainer = {"updates": step, "learning_rate": float(np.mean(rates))}
        trainer |= {"beta2": settings.beta2, "epsilon": settings.epsilon}
        found.append(TrainedModel(copy.deepcopy(model).eval(), moments, trainer))
    return found


def mean_losses(model: Any, rows: list[Row]) -> np.ndarray:
    """Return each row's mean answer-token loss, nats."""
    import torch

    from stages.model.batch import collate, length_buckets
    from stages.model.loss import document_losses

    loss_N = np.zeros(len(rows))
    with torch.no_grad():
        for bucket in length_buckets([len(row.input_ids) for row in rows], 4096):
            loss_sum_D, answer_tokens_D = document_losses(model, collate([rows[index] for index in bucket]))
            loss_N[bucket] = (loss_sum_D.double() / answer_tokens_D).numpy()
    return loss_N


def lds(score_NZ: np.ndarray, half_MN: np.ndarray, loss_MZ: np.ndarray, weight_BM: np.ndarray) -> np.ndarray:
    """Return the LDS of each item under each weighting of the subsets, (B, Z): Pearson's correlation of the ranks."""
    predicted_MZ = rankdata(half_MN @ score_NZ, axis=0)
    actual_MZ = rankdata(-loss_MZ, axis=0)
    weight_BM = weight_BM / weight_BM.sum(axis=1, keepdims=True)
    means = [weight_BM @ ranks for ranks in (predicted_MZ, actual_MZ)]
    joint = weight_BM @ (predicted_MZ * actual_MZ) - means[0] * means[1]
    spread = [weight_BM @ ranks**2 - mean**2 for ranks, mean in zip((predicted_MZ, actual_MZ), means, strict=True)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(joint / np.sqrt(spread[0] * spread[1]))


class Bootstrap:
    """Draws of subsets and items, the same for every arm, so that arms are compared pair by pair."""

    def __init__(self, half_MN: np.ndarray, loss_MZ: np.ndarray) -> None:
        rng = np.random.default_rng(0)
        halves, items = loss_MZ.shape
        self._data = half_MN, loss_MZ
        self._subsets = rng.multinomial(halves, np.full(halves, 1 / halves), BOOTSTRAPS)
        self._items = rng.multinomial(items, np.full(items, 1 / items), BOOTSTRAPS) / items

    def of(self, score_NZ: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the LDS and its bootstrap draws."""
        whole = lds(score_NZ, *self._data, np.ones((1, len(self._data[1])))).mean()
        return float(whole), (lds(score_NZ, *self._data, self._subsets) * self._items).sum(axis=1)


def interval(draws: np.ndarray) -> list[float]:
    """Return the 95 % percentile interval."""
    return [round(float(value), 3) for value in np.quantile(draws, (0.025, 0.975))]


def main() -> None:
    """Retrain, score with every arm, and report the scores' fidelity."""
    parser = Options(__doc__, "fewer rows, halves and epochs; under three minutes")
    parser.add_argument("--audit-model", type=Path, default=None, help="folder of the model of the noise audit")
    options = parser.read()
    import torch

    from data_contracts.config import ModelConfig
    from stages.model.load import load_model, pin_model

    torch.set_num_threads(1)
    size, folder = QUICK if options.quick else FULL, (options.data / "stories260k").resolve()
    base = load_model(pin_model(ModelConfig(path=folder.name), folder.parent))
    rows = read_rows(options.data, folder, size.pool + size.items, LONGEST)
    pool, items = rows[: size.pool], rows[size.pool :]
    drawn = [np.random.default_rng([1, half]).permutation(size.pool)[: size.pool // 2] for half in range(size.halves)]
    half_MN = np.zeros((size.halves, size.pool))
    for half, members in enumerate(drawn):
        half_MN[half, members] = 1
    loss_MZ = np.stack([mean_losses(train(base, pool, set(m.tolist()), size.epochs)[-1].model, items) for m in drawn])
    checkpoints = train(base, pool, set(range(size.pool)), size.epochs)
    weights = np.array([trained.trainer["learning_rate"] for trained in checkpoints])
    found = {
        arm: sum(
            w * scores_of({"method": arm}, trained, pool, items)
            for w, trained in zip(weights, checkpoints, strict=True)
        )
        for arm in ARMS
    }
    try:
        from benchmarks.peer_trak import dattri_trak
    except ImportError as error:
        print(f"no arm dattri_trak: {error} (the extra `peers` brings dattri)")
    else:
        found["dattri_trak"] = dattri_trak(checkpoints, pool, items, size.dimensions, PEER["regularisation"])
    bootstrap = Bootstrap(half_MN, loss_MZ)
    results = {arm: bootstrap.of(np.asarray(score)) for arm, score in found.items()}
    figures: dict[str, Any] = {f"lds_{arm}": round(value, 3) for arm, (value, _) in results.items()}
    figures |= {f"lds_{arm}_interval": interval(draws) for arm, (_, draws) in results.items()}
    for arm in results.keys() - {"influence"}:
        figures[f"influence_minus_{arm}"] = interval(results["influence"][1] - results[arm][1])
    before = mean_losses(base, items).mean()
    figures |= {"loss_before": round(float(before), 3), "loss_after": round(float(loss_MZ.mean()), 3)}
    figures |= {"rows": size.pool, "items": size.items, "halves": size.halves, "model": folder.name}
    report("fidelity", figures | audit(options.data, options.audit_model, quick=options.quick))


if __name__ == "__main__":
    main()
