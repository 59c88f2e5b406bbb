"""Facility location beside apricot and submodlib, and on many rows: speed, memory, and what the set is worth.

Real features: mean-pooled last hidden states of a real small model over windows of real instructions. `fl_vs_…` times
choosing alone, from one matrix of similarities that all three get; `fl_whole_vs_…` the whole job, from features, each
with its own similarities. CPU seconds of one thread, in rounds that alternate (the median counts; each once before, so
that nothing is compiled or loaded on the clock). Many rows take the sparse way, in a process of its own for its memory.
The peers come from the extra `peers`.

    python -m benchmarks.selection [--quick] [--data FOLDER] [--rows N] [--many N]
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.options import Options
from stages.coreset.greedy import lazy_greedy
from stages.coreset.objectives import DenseFacilityLocation, SparseFacilityLocation
from stages.coreset.similarity import dense_cosine, nearest_cosine, unit_rows

WINDOW = 24
"""Tokens of one row."""
NEIGHBOURS = 64


def features(data: Path, count: int) -> np.ndarray:
    """Return feature_nK of the first `count` windows of the instructions, float32."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = data / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    windows: list[list[int]] = []
    with gzip.open(data / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = tokenizer(f"{row['input']}\n{row['output']}", add_special_tokens=False)["input_ids"]
            windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
            if len(windows) >= count:
                break
    if len(windows) < count:
        raise SystemExit(f"the instructions hold {len(windows)} windows, not {count}")
    found = np.empty((count, model.config.hidden_size), dtype=np.float32)
    with torch.no_grad():
        for start in range(0, count, 512):
            part = torch.tensor(windows[start : min(start + 512, count)])
            found[start : start + len(part)] = model(part).last_hidden_state.mean(dim=1).numpy()
    return found - found.mean(axis=0)  # what all rows share tells none from another


def ours(given: np.ndarray, count: int, *, whole: bool) -> list[int]:
    """Choose by our lazy greedy, from features (`whole`) or similarities."""
    return lazy_greedy(DenseFacilityLocation(dense_cosine(unit_rows(given)) if whole else given), count)[0].tolist()


def apricot(given: np.ndarray, count: int, *, whole: bool) -> list[int]:
    """Choose by apricot's lazy greedy."""
    from apricot import FacilityLocationSelection

    metric = "cosine" if whole else "precomputed"
    chosen = FacilityLocationSelection(count, metric=metric, optimizer="lazy").fit(given)
    return [int(row) for row in chosen.ranking]


def submodlib(given: np.ndarray, count: int, *, whole: bool) -> list[int]:
    """Choose by submodlib's lazy greedy."""
    from submodlib import FacilityLocationFunction

    what = {"data": given, "metric": "cosine"} if whole else {"sijs": given, "separate_rep": False}
    made = FacilityLocationFunction(n=len(given), mode="dense", **what)
    chosen = made.maximize(
        budget=count, optimizer="LazyGreedy", stopIfZeroGain=False, stopIfNegativeGain=False, show_progress=False
    )
    return [int(row) for row, _ in chosen]


def plain_greedy(similarity_nn: np.ndarray, count: int) -> float:
    """Return the objective of greedy that looks at every candidate every time."""
    nearest = np.zeros(len(similarity_nn), dtype=np.float32)
    for _ in range(count):
        gain = np.maximum(similarity_nn - nearest, 0).sum(axis=1, dtype=np.float64)
        np.maximum(nearest, similarity_nn[int(gain.argmax())], out=nearest)
    return float(nearest.sum(dtype=np.float64))


def sparse(data: Path, rows: int, count: int) -> dict[str, Any]:
    """Choose by the sparse way in this process; return seconds, memory beyond the features, and the rows."""
    from stages.meter.memory import PeakMeter

    unit_nK = unit_rows(features(data, rows))
    with PeakMeter() as meter:
        began = time.process_time()
        near = nearest_cosine(unit_nK, NEIGHBOURS)
        found, _ = lazy_greedy(SparseFacilityLocation(near), count)
        seconds = time.process_time() - began
    return {"seconds": seconds, "peak_bytes": meter.bytes, "rows": found.tolist()}


def beside_peers(data: Path, rows: int, count: int, rounds: int) -> dict[str, Any]:
    """Run the three on one matrix and return the figures."""
    unit_nK = unit_rows(features(data, rows))
    similarity_nn = dense_cosine(unit_nK)
    given = {False: {"apricot": similarity_nn.astype(np.float64)}, True: {"apricot": unit_nK.astype(np.float64)}}
    ways = {"ours": ours, "apricot": apricot, "submodlib": submodlib}
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    chosen: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for whole in (True, False):
            for name, way in ways.items():
                what = given[whole].get(name, unit_nK if whole else similarity_nn)
                began = time.process_time()
                chosen[name] = way(what, count, whole=whole)
                if turn:
                    seconds[name, whole].append(time.process_time() - began)
    took = {key: statistics.median(values) for key, values in seconds.items()}
    worth = {name: float(similarity_nn[rows_].max(axis=0).sum(dtype=np.float64)) for name, rows_ in chosen.items()}
    for name in ways:
        said = f"{took[name, False]:8.3f} CPU s   from features {took[name, True]:8.3f} CPU s"
        print(f"\n{name:10s} {said}   objective {worth[name]:.3f}")
    exact = plain_greedy(similarity_nn, count) if rows <= 2000 else worth["submodlib"]
    found = sparse(data, rows, count)["rows"]
    return {
        **{
            f"fl_{'whole_' if whole else ''}vs_{name}": round(took[name, whole] / took["ours", whole], 2)
            for whole in (False, True)
            for name in ("apricot", "submodlib")
        },
        "fl_objective_ratio": worth["ours"] / exact,
        "sparse_objective_ratio": round(
            float(similarity_nn[found].max(axis=0).sum(dtype=np.float64)) / worth["ours"], 4
        ),
    }


def main() -> None:
    """Run both parts and print the figures."""
    parser = Options(__doc__, "fewer rows; under three minutes")
    parser.add_argument("--rows", type=int, default=None, help="rows that are compared with peers (5,000)")
    parser.add_argument("--many", type=int, default=None, help="rows of the sparse way (50,000)")
    options = parser.read()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import faiss
    import torch

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = options.rows or (2000 if options.quick else 5000)
    many = options.many or (10_000 if options.quick else 50_000)
    sizes = [many // 4, many // 2, many]  # first: a fork must not come after OpenMP has run
    ran = [in_own_process(partial(sparse, options.data, size, size // 50)) for size in sizes]
    figures = beside_peers(options.data, rows, rows // 10, 3)
    seconds = [one["seconds"] for one in ran]
    exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    for size, one in zip(sizes, ran, strict=True):
        print(f"sparse {size:7d} rows {one['seconds']:8.2f} CPU s   peak {one['peak_bytes'] / 1e6:8.1f} MB")
    report(
        "selection",
        {
            **figures,
            "sparse_peak_bytes": ran[-1]["peak_bytes"],
            "n_exponent": round(float(exponent), 2),
            "rows": rows,
            "many": many,
        },
    )


if __name__ == "__main__":
    main()
