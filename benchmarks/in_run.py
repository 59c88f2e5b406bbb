"""What reading every row's influence in training costs beside the same training without, on the same windows.

Both arms make the optimizer steps of one segment on real rows, from the same weights, in a process of their own, on one
thread, by CPU seconds; rounds alternate and the median ratio counts. The arm `in_run` multiplies with a fixed direction
of every weight matrix; what it read at the first step is compared with the bare loop's products (one row at a time, the
whole gradient), and the weights that both arms end with with each other. Making the direction, one forward and backward
pass over the target, is not part of a step: `target_vs_step` states one such pass over a window's rows.

    python -m benchmarks.in_run [--quick] [--data FOLDER] [--model FOLDER]
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.options import Options
from benchmarks.scoring import read_rows

if TYPE_CHECKING:
    from stages.model.batch import Row, TokenBatch

WINDOW, MICRO_BATCH = 16, 8
"""Rows an optimizer step, and rows a forward and backward pass: the product's defaults with accumulation 2."""


def windows_of(rows: list[Row]) -> list[list[TokenBatch]]:
    """Return the micro-batches of each window, as training lays them out."""
    from stages.model.batch import collate
    from stages.train.order import lay_out

    windows = [rows[at : at + WINDOW] for at in range(0, len(rows) - WINDOW + 1, WINDOW)]
    return [
        [
            collate([window[place] for place in micro.places])
            for micro in lay_out([len(row.input_ids) for row in window], MICRO_BATCH)
        ]
        for window in windows
    ]


def run_arm(arm: str, model: Any, windows: list[list[TokenBatch]]) -> dict[str, Any]:
    """Make the steps of `windows` in this process; return CPU seconds, memory, and what there is to compare."""
    import torch

    from data_contracts.config import TrainConfig
    from stages.gradients.precondition import mean_gradient
    from stages.gradients.row_products import RowProducts, covered
    from stages.meter.memory import PeakMeter
    from stages.technique.step import optimizer_for, optimizer_step

    train = TrainConfig(learning_rate=1e-3)
    optimizer = optimizer_for(model, train, 1e-3)
    products = RowProducts(model, direction_of(model, covered(model))) if arm == "in_run" else None
    first: list[float] = []
    with PeakMeter() as meter:
        began = time.process_time()
        for number, window in enumerate(windows if arm != "target" else []):
            result = optimizer_step(model, optimizer, window, clip=1.0, precision="float32", products=products)
            if number == 0 and result.document_product_D is not None:
                first = result.document_product_D.tolist()
        if arm == "target":
            for window in windows:
                mean_gradient(model, window)
        seconds = time.process_time() - began
    ends = float(torch.stack([value.detach().double().sum() for value in model.parameters()]).sum())
    return {"cpu_seconds": seconds, "peak_bytes": meter.bytes, "products": first, "weights": ends}


def direction_of(model: Any, names: list[str]) -> dict[str, Any]:
    """Return a fixed direction of these parameters; what it holds does not change the cost."""
    import torch

    torch.manual_seed(0)
    named = dict(model.named_parameters())
    return {name: torch.randn_like(named[name]) for name in names}


def explicit(model: Any, window: list[TokenBatch], rows: dict[str, Row]) -> list[float]:
    """Return the products of a window's rows by the bare loop, in the order of its batches."""
    from stages.gradients.row_products import covered
    from stages.model.batch import collate
    from stages.model.loss import document_losses

    direction, named, found = direction_of(model, covered(model)), dict(model.named_parameters()), []
    for example_id in (name for batch in window for name in batch.example_ids):
        document_losses(model, collate([rows[example_id]]))[0].sum().backward()
        found.append(sum(float((named[name].grad * value).sum()) for name, value in direction.items()))
        model.zero_grad(set_to_none=True)
    return found


def main() -> None:
    """Run the arms in alternating rounds and report the ratio."""
    parser = Options(__doc__, "fewer rows and rounds; under a minute")
    parser.add_argument("--model", type=Path, default=None, help="folder of a model; default: the data's small one")
    parser.add_argument("--rows", type=int, default=None)
    options = parser.read()
    folder = (options.model or options.data / "stories260k").resolve()
    import torch

    from data_contracts.config import ModelConfig
    from stages.gradients.row_products import covered
    from stages.model.load import load_model, pin_model

    torch.set_num_threads(1)
    model = load_model(pin_model(ModelConfig(path=folder.name), folder.parent)).requires_grad_(True)
    pool = read_rows(options.data, folder, options.rows or (96 if options.quick else 384), 512)
    windows = windows_of(pool)
    in_own_process(partial(run_arm, "train", model, windows[:1]))  # files and kernels are in the caches
    rounds = [
        {arm: in_own_process(partial(run_arm, arm, model, windows)) for arm in ("train", "in_run", "target")}
        for _ in range(5 if options.quick else 9)
    ]
    ratio = [item["in_run"]["cpu_seconds"] / item["train"]["cpu_seconds"] for item in rounds]
    target = [item["target"]["cpu_seconds"] / item["train"]["cpu_seconds"] for item in rounds]
    wanted = np.array(explicit(model, windows[0], {row.example_id: row for row in pool}))
    read, one = np.array(rounds[0]["in_run"]["products"]), rounds[0]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    report(
        "in_run",
        {
            "in_run_overhead": round(statistics.median(ratio), 3),
            "in_run_overhead_rounds": [round(value, 3) for value in sorted(ratio)],
            "in_run_error": float(np.abs(read - wanted).max() / np.abs(wanted).max()),
            "weights_difference": abs(one["in_run"]["weights"] / one["train"]["weights"] - 1),
            "covered_parameters": round(sum(sizes[name] for name in covered(model)) / sum(sizes.values()), 4),
            "target_vs_step": round(statistics.median(target), 3),
            "peak_bytes": {arm: one[arm]["peak_bytes"] for arm in ("train", "in_run")},
            "rows": len(pool),
            "tokens": sum(len(row.input_ids) for row in pool),
            "model": folder.name,
        },
    )


if __name__ == "__main__":
    main()
