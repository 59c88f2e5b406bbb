"""What low-rank directions save on a model with wide layers, and how far off its scores are by them.

A short warm-up on real rows gives moments; `influence` scores the same pool with whole directions and with cut ones, in
this process, on one thread, by CPU seconds. What finding the ranks takes is stated apart: it is paid once a scoring.

    python -m benchmarks.low_rank --model FOLDER [--rows N] [--longest TOKENS] [--groups J] [--limit SHARE]
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.chain import report
from benchmarks.scorers import table_of
from benchmarks.scoring import batches_of, read_rows, train_pass

WARM_UP, WINDOW, TARGET = 64, 8, 32


def main() -> None:
    """Warm up, score both ways and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--least-side", type=int, default=None, help="of a layer that counts as wide")
    options = parser.parse_args()
    import torch
    from scipy.stats import spearmanr

    from data_contracts.config import ModelConfig, TrainConfig
    from stages.gradients.inner_product import InnerProducts
    from stages.model.batch import TokenTable
    from stages.model.checkpoint import TrainedModel
    from stages.model.load import load_model, pin_model
    from stages.score import ranks
    from stages.score.scorer import Given, Meter
    from stages.score.target import target_directions
    from stages.technique.step import moments_of, optimizer_for, optimizer_step

    torch.set_num_threads(1)
    ranks.WIDE_SIDE = options.least_side or ranks.WIDE_SIDE
    folder = options.model.resolve()
    model = load_model(pin_model(ModelConfig(path=folder.name), folder.parent)).requires_grad_(True)
    rows = read_rows(options.data, folder, WARM_UP + TARGET + options.rows, options.longest)
    train = TrainConfig()
    optimizer = optimizer_for(model, train, 2e-5)
    for start in range(0, WARM_UP, WINDOW):
        optimizer_step(model, optimizer, batches_of(rows[start : start + WINDOW], 512), clip=1.0)
    trainer = {"updates": WARM_UP // WINDOW, "beta2": train.beta2, "epsilon": train.epsilon}
    trained = TrainedModel(model.eval(), moments_of(optimizer, model), trainer)
    target, pool = rows[WARM_UP : WARM_UP + TARGET], rows[WARM_UP + TARGET :]
    batches = batches_of(pool, 2048)
    with ExitStack() as resources:
        given = Given(
            seed=0,
            pool_rows=10**6,
            batch_tokens=2048,
            meter=Meter(),
            notice=print,
            resources=resources,
            groups=tuple(map(str, range(options.groups))),
            members=tuple(np.arange(TARGET)[j :: options.groups] for j in range(options.groups)),
            target=TokenTable(table_of(target)),
            trained=trained,
        )
        directions = target_directions(given)
        seconds, scores = {}, {}

        def timed(name: str, products: InnerProducts) -> None:
            with products:
                products.of(batches[-1])
                began = time.process_time()
                scores[name] = np.concatenate([products.of(batch).product_DJ.numpy() for batch in batches])
                seconds[name] = time.process_time() - began

        timed("whole", InnerProducts(model, directions))
        began = time.process_time()
        factors = ranks.low_rank(given, directions, limit=options.limit, rows=4096)
        found = time.process_time() - began
        timed("cut", InnerProducts(model, directions, factors=factors))
    train_pass(model, batches[-1:])
    began = time.process_time()
    train_pass(model, batches)
    plain = time.process_time() - began
    error_J = np.linalg.norm(scores["cut"] - scores["whole"], axis=0) / np.linalg.norm(scores["whole"], axis=0)
    ranked = min(spearmanr(scores["cut"][:, j], scores["whole"][:, j]).statistic for j in range(options.groups))
    report(
        "low_rank",
        {
            "whole_vs_train": round(seconds["whole"] / plain, 3),
            "cut_vs_train": round(seconds["cut"] / plain, 3),
            "finding_seconds": round(found, 2),
            "train_seconds": round(plain, 2),
            "error": float(error_J.max()),
            "spearman": float(ranked),
            "rows": len(pool),
            "tokens": sum(len(row.input_ids) for row in pool),
            "model": folder.name,
            **given.facts,
        },
    )


if __name__ == "__main__":
    main()
