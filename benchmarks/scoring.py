"""What direct influence costs beside plain training and beside the batch-1 loop, on the same rows, model and batches.

Each arm runs in a forked process, so that its memory is its own, on one thread, by CPU seconds (a busy machine slows
the wall clock, not these), in rounds that alternate; the median round counts. Every arm reads the same pool:

    train    forward + backward of the pool in length buckets: what training on it once costs, optimizer aside
    direct   influence for one target group: the score stage's own pass (taps on every trainable parameter)
    groups   the same for eight target groups
    forward  forward-only influence for one target group: two forward passes with the weights moved
    batch1   one example at a time, its whole gradient formed and multiplied with the same direction
    features every example's projected and preconditioned gradient, 256 numbers a layer

Scores of `direct` and `batch1` are compared, and those of `forward` and `batch1` by rank, so that what is timed is
right. The target's own pass, which training would not need, is stated as `target_vs_train` for a target as large as
the pool. LESS's way, sketches and quantised stores: see `benchmarks.features`.

    python -m benchmarks.scoring [--quick] [--batching] [--longest TOKENS] [--data FOLDER] [--model FOLDER]
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.chain import report
from benchmarks.features import features_pass, projections, store
from benchmarks.forked import in_own_process
from benchmarks.options import Options

if TYPE_CHECKING:
    from torch import Tensor

    from stages.model.batch import Row, TokenBatch

ARMS = ("train", "direct", "groups", "forward", "batch1", "target", "features")
BATCHING = ("train", "direct", "forward", "batch1")
"""What batching and forms cost, for short rows or a model too large for LESS's way."""
GROUPS = 8
BESIDE = 64
"""Rows besides the pool: half for a warm-up, half for a target."""
FORWARD_STEP = 1e-4
"""Of the weights' norm: what the method chooses in float32."""


def read_rows(data: Path, model: Path, count: int, longest: int) -> list[Row]:
    """Return `count` instructions drawn by a fixed seed, prompt and answer tokenised; only the answer is supervised."""
    from data_contracts.config import ModelConfig
    from stages.model.batch import Row
    from stages.model.load import load_tokenizer, pin_model

    tokenizer = load_tokenizer(pin_model(ModelConfig(path=model.name), model.parent))
    with gzip.open(data / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    rows: list[Row] = []
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        text = texts[index]
        prompt = tokenizer(f"{text['instruction']}\n{text['input']}\n")["input_ids"]
        output = text["output"] if isinstance(text["output"], str) else text["output"][0]
        answer = tokenizer(str(output), add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *answer])
        if answer and len(ids) <= longest:
            rows.append(Row(f"{index:06d}", ids, np.arange(len(ids)) >= len(prompt)))
        if len(rows) == count:
            break
    return rows


def batches_of(rows: list[Row], batch_tokens: int) -> list[TokenBatch]:
    """Return the rows as the score stage batches them."""
    from stages.model.batch import collate, length_buckets

    buckets = length_buckets([len(row.input_ids) for row in rows], batch_tokens)
    return [collate([rows[index] for index in bucket]) for bucket in buckets]


def direction_of(model: Any, groups: int) -> dict[str, Tensor]:
    """Return fixed directions of the size of the parameters; what they hold does not change the cost."""
    import torch

    torch.manual_seed(0)
    return {name: torch.randn(groups, *parameter.shape) for name, parameter in model.named_parameters()}


def train_pass(model: Any, batches: list[TokenBatch]) -> None:
    """One forward and backward pass as training does it: the loss per answer token, gradients for every parameter."""
    from stages.model.loss import document_losses

    for batch in batches:
        loss_sum_D, answer_tokens_D = document_losses(model, batch)
        (loss_sum_D.sum() / answer_tokens_D.sum()).backward()
        model.zero_grad(set_to_none=True)


def direct_pass(products: Any, batches: list[TokenBatch]) -> dict[str, float]:
    """Return each example's product with the first direction."""
    found: dict[str, float] = {}
    for batch in batches:
        product_D = (products.of(batch).product_DJ[:, 0]).tolist()
        found.update(zip(batch.example_ids, product_D, strict=True))
    return found


def forward_pass(model: Any, direction: dict[str, Tensor], batches: list[TokenBatch]) -> dict[str, float]:
    """Return each example's product with the first direction, by the difference of two forward passes."""
    from stages.gradients.differences import Differences

    differences = Differences(model, direction, None, central=True)
    differences.step_J = [FORWARD_STEP]
    found: dict[str, float] = {}
    for batch in batches:
        found.update(zip(batch.example_ids, differences.of(batch)[0][:, 0].tolist(), strict=True))
    return found


def batch1_pass(model: Any, rows: list[Row], direction: dict[str, Tensor]) -> dict[str, float]:
    """The bare loop: one example's whole gradient, then its product with the direction."""
    from stages.model.batch import collate
    from stages.model.loss import document_losses

    found = {}
    for row in rows:
        loss_sum_D, _ = document_losses(model, collate([row]))
        loss_sum_D.sum().backward()
        total = sum(float((p.grad * direction[name][0]).sum()) for name, p in model.named_parameters())
        model.zero_grad(set_to_none=True)
        found[row.example_id] = total
    return found


def run_arm(arm: str, model: Any, pool: list[Row], batches: list[TokenBatch]) -> dict[str, Any]:
    """Run one arm in this process and return its CPU seconds, its memory and its scores."""
    from stages.gradients.inner_product import InnerProducts
    from stages.gradients.precondition import mean_gradient
    from stages.meter.memory import PeakMeter

    train_pass(model, batches[-1:])  # kernels and buffers are ready
    works: dict[str, Callable[[], Any]] = {
        "train": lambda: train_pass(model, batches),
        "target": lambda: mean_gradient(model, batches),
        "features": lambda: features_pass(model, batches),
    }
    if arm in ("direct", "groups", "forward", "batch1"):
        direction = direction_of(model, GROUPS if arm == "groups" else 1)
        works["batch1"] = lambda: batch1_pass(model, pool, direction)
        works["forward"] = lambda: forward_pass(model, direction, batches)
        works["direct"] = works["groups"] = lambda: _direct(InnerProducts(model, direction), batches)
    with PeakMeter() as meter:
        began = time.process_time()
        found = works[arm]()
        seconds = time.process_time() - began
    scores = found if arm in ("direct", "forward", "batch1") else {}
    return {"cpu_seconds": seconds, "peak_bytes": meter.bytes, "before_bytes": meter.before, "scores": scores}


def _direct(products: Any, batches: list[TokenBatch]) -> dict[str, float]:
    with products:
        return direct_pass(products, batches)


def main() -> None:
    """Run every arm in alternating rounds and report the ratios."""
    parser = Options(__doc__, "fewer rows and rounds; under three minutes")
    parser.add_argument("--model", type=Path, default=None, help="folder of a model; default: the data's small one")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--batching", action="store_true", help=f"only {', '.join(BATCHING)}")
    options = parser.read()
    folder = (options.model or options.data / "stories260k").resolve()
    rows = options.rows or (192 if options.quick else 768)
    import torch

    from data_contracts.config import ModelConfig
    from stages.model.load import load_model, pin_model

    torch.set_num_threads(1)
    model = load_model(pin_model(ModelConfig(path=folder.name), folder.parent))
    arms = BATCHING if options.batching else ARMS
    pool = read_rows(options.data, folder, rows + BESIDE, options.longest)
    beside, pool = pool[:BESIDE], pool[BESIDE:]
    batches = batches_of(pool, options.batch_tokens)
    rounds = [
        {arm: in_own_process(partial(run_arm, arm, model, pool, batches)) for arm in arms}
        for _ in range(3 if options.quick else 5)
    ]
    seconds = {arm: statistics.median(item[arm]["cpu_seconds"] for item in rounds) for arm in arms}
    first = rounds[0]
    direct, single = (np.array(list(first[arm]["scores"].values())) for arm in ("direct", "batch1"))
    order = [list(first["direct"]["scores"]).index(name) for name in first["batch1"]["scores"]]
    ranks = [
        np.argsort(np.argsort([first[arm]["scores"][name] for name in first["batch1"]["scores"]]))
        for arm in ("forward", "batch1")
    ]
    for arm in arms:
        print(
            f"{arm:8s} {seconds[arm]:8.2f} CPU s   {seconds[arm] / seconds['train']:5.2f} x train   "
            f"peak {first[arm]['peak_bytes'] / 1e6:8.1f} MB"
        )
    figures: dict[str, Any] = {
        "direct_vs_train": round(seconds["direct"] / seconds["train"], 3),
        "direct_vs_batch1": round(seconds["batch1"] / seconds["direct"], 3),
        "forward_vs_train": round(seconds["forward"] / seconds["train"], 3),
        "forward_spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
        "direct_error": float(np.abs(direct[order] - single).max() / np.abs(single).max()),
        "peak_bytes": {arm: first[arm]["peak_bytes"] for arm in arms},
        "rows": len(pool),
        "tokens": sum(len(row.input_ids) for row in pool),
        "model": folder.name,
    }
    if not options.batching:
        made = in_own_process(lambda: projections(model, pool))
        goal = batches_of(beside[BESIDE // 2 :], options.batch_tokens)
        figures |= {
            "groups8_vs_train": round(seconds["groups"] / seconds["train"], 3),
            "target_vs_train": round(seconds["target"] / seconds["train"], 3),
            "direct_vs_less": round(made["less_seconds"] * len(pool) / seconds["direct"], 1),
            "features_vs_train": round(seconds["features"] / seconds["train"], 3),
            "sketch_vs_trak": round(made["trak_seconds"] / made["sketch_seconds"], 1),
            "sketch_error_vs_trak": round(made["sketch_error"] / made["trak_error"], 3),
            **in_own_process(lambda: store(model, beside[: BESIDE // 2], batches, goal)),
        }
        figures["peak_bytes"] |= made["peak_bytes"]
    report("scoring", figures)


if __name__ == "__main__":
    main()
