"""How much noise is selected? Three in ten answers of a real pool are given to other rows' questions.

The pools are those of benchmarks.relevance (Super-NaturalInstructions by task), their answers shuffled among the noisy
rows of the whole pool. Every scorer that the pipeline serves scores from the warm-up's checkpoint of a small real
model, the best tenth is chosen by each, and by selectors over influence's scores and features, with and without the
noise filter `answer_fit`; influence also with each other filter. A figure is the share of shuffled rows among the
chosen, `[mean, low, high]`: 95 % by a bootstrap of cells, then of their rows. `_within` is the harder pool whose
answers are shuffled inside each task. The filters' defaults were chosen on other categories and seeds (Question
Generation, Information Extraction; 0 and 1).

    python -m benchmarks.noise [--quick] [--seeds N ...] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from benchmarks.cells import draw_categories, read_tasks, settings
from benchmarks.chain import Chain, report
from benchmarks.noise_audit import area
from benchmarks.options import Options
from benchmarks.relevance import ELSEWHERE, write_cell
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import SelectConfig
from data_contracts.method import names, resolve
from data_contracts.records import Result
from stages.score.scorer import Scorer
from stages.select.choose import choose
from stages.select.features import features_for
from stages.select.join import column_for, scores_for
from stages.select.noise import Evidence, NoiseFilter
from stages.select.selector import Candidates
from stages.statistics.trajectories import Trajectories

SHARE, CHOSEN, RESAMPLES, VISITS = 0.3, 0.1, 10_000, 2
FILTER = "answer_fit"
QUICK = ("influence", "bm25")
FEATURED: dict[str, dict[str, Any]] = {
    "semdedup": {},
    "facility_location": {"best": 0.3},
    "k_center": {"best": 0.3},
    "grad_match": {"best": 0.3},
}
"""Selectors over influence's features, those that read no scores among the best three in ten by them."""


def shuffle_answers(folder: Path, seed: int, *, within: bool) -> None:
    """Give `SHARE` of the pool's rows each other's answers, and note in each row whether its answer changed."""
    rows = [json.loads(line) for line in (folder / "pool.jsonl").read_text(encoding="utf-8").splitlines()]
    noisy = np.random.default_rng([seed, 7]).choice(len(rows), int(SHARE * len(rows)), replace=False).tolist()
    rings: dict[str, list[int]] = defaultdict(list)
    for row in noisy:
        rings[rows[row]["task"] if within else ""].append(row)
    givers = {row: ring[place - 1] for ring in rings.values() for place, row in enumerate(ring)}
    with (folder / "pool.jsonl").open("w", encoding="utf-8") as out:
        for index, row in enumerate(rows):
            answer = rows[givers.get(index, index)]["output"]
            changed = {**row, "output": answer, "wrong": answer != row["output"]}
            out.write(json.dumps(changed, ensure_ascii=False) + "\n")


class Cell:
    """A noisy pool, scored by every method; `wrong_N` says which of its rows have another's answer."""

    def __init__(self, folder: Path, model: Path, seed: int, scorers: tuple[str, ...], *, visited: bool) -> None:
        values = settings(model, seed)
        values["ingest"]["dedupe"] = "exact"
        self.chain = chain = Chain(folder, values)
        config = chain.config()
        data = chain.call("ingest", config)
        base, pool, target = data.ref("base"), data.ref("pool_tokens"), data.ref("target_tokens")
        shared = {"base": base, "pool_tokens": pool, "target_tokens": target}
        plan = chain.call("plan", config, **shared).ref("plan")
        validation = data.ref("validation_tokens")
        warm = chain.call("begin", config, base=base, plan=plan, pool_tokens=pool, validation_tokens=validation)
        given = {"checkpoint": warm.ref("checkpoint"), "pool": data.ref("pool"), "target": data.ref("target")}
        self.scored: dict[str, pa.Table] = {}
        for method in scorers:
            scorer = {"method": method, **({"store_bits": 8} if method == "influence" else {})}
            done = chain.call("score", chain.config(score={"scorer": scorer}), plan=plan, **shared, **given)
            self.scored[method] = self.table(done, "scores")
            if method == "influence":
                self.features = self.table(done, "features")
        self.visits = None
        if visited:
            whole = {"selector": {"method": "random"}, "fraction": 1.0}
            selection = chain.call("select", chain.config(select=whole), pool_tokens=pool).ref("selection")
            trained = chain.call(
                "train",
                chain.config(train={"epochs": VISITS, "evaluations": 1}),
                base=base,
                plan=plan,
                tokens=pool,
                selection=selection,
                validation_tokens=validation,
                checkpoint=warm.ref("checkpoint"),
            )
            self.visits = Trajectories([chain.store.open(trained.refs["example_losses"])])
        self.tokens = self.table(data, "pool_tokens")
        examples = self.table(data, "pool")
        self.ids = self.tokens.column("example_id")
        extra = [json.loads(text) for text in examples.column("extra").to_pylist()]
        noted = dict(zip(examples.column("example_id").to_pylist(), extra, strict=True))
        self.wrong_N = np.array([noted[example_id]["wrong"] for example_id in self.ids.to_pylist()])
        self.seed = seed

    def table(self, done: Result, output: str) -> pa.Table:
        """Return a table that a stage made."""
        return read_table(self.chain.store.open(done.refs[output]) / TABLE_FILE)

    def candidates(self, scorer: str) -> Candidates:
        """Return the pool with the scores of a scorer, and influence's features."""
        lengths = self.tokens.column("n_tokens").to_numpy()
        scores, features = self.scores(scorer), features_for(self.ids, self.features)
        return Candidates(self.ids, self.tokens.column("source"), lengths, scores, features=features)

    def scores(self, scorer: str) -> np.ndarray:
        """Return the pool's scores by a scorer."""
        return scores_for(self.ids, self.scored[scorer])[0]

    def suspicion(self, method: str, **given: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows kept, suspicion_N) of a noise filter for a choice by influence."""
        evidence = Evidence(
            self.tokens,
            self.scores("influence"),
            column_for(self.ids, self.scored["influence"], "loss"),
            tuple(self.scores(name) for name in self.scored if name != "influence"),
            self.visits,
            features_for(self.ids, self.features),
        )
        sifted = resolve(NoiseFilter, {"method": method, **given}, "noise").sift(evidence)
        return sifted.kept_K, sifted.suspicion_N

    def chosen(self, selector: dict[str, Any], scorer: str, kept_K: np.ndarray | None) -> np.ndarray:
        """Return for each chosen row whether its answer is another's."""
        config = SelectConfig(selector=selector, fraction=CHOSEN)
        rng = np.random.default_rng(self.seed)
        return self.wrong_N[choose(config, self.candidates(scorer), rng, lambda _: None, kept_K=kept_K).rows]


def interval(cells: list[np.ndarray], less: list[np.ndarray] | None = None) -> list[float]:
    """Return [mean over cells, low, high] of the share of true, or of its difference to `less`: 95 % by bootstrap."""
    rng = np.random.default_rng(0)
    counts = np.array([[len(cell), cell.sum()] for cell in cells])
    other = np.array([[len(cell), cell.sum()] for cell in less]) if less is not None else None
    picked = rng.integers(len(cells), size=(RESAMPLES, len(cells)))
    draws = _resampled(rng, counts, picked)
    point = float((counts[:, 1] / counts[:, 0]).mean())
    if other is not None:
        draws = draws - _resampled(rng, other, picked)
        point -= float((other[:, 1] / other[:, 0]).mean())
    return [round(value, 3) for value in (point, *np.quantile(draws, [0.025, 0.975]).tolist())]


def _resampled(rng: np.random.Generator, counts: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Return the mean share of each draw of cells, the rows of each cell drawn anew (a binomial count)."""
    size, share = counts[picked, 0], (counts[:, 1] / counts[:, 0])[picked]
    return np.asarray((rng.binomial(size, share) / size).mean(axis=1))


def arms(cell: Cell, found: dict[str, list[np.ndarray]], end: str = "") -> dict[str, Any]:
    """Choose by every arm, note which chosen rows are noise, and return what the filters themselves do."""
    kept_K, suspicion_N = cell.suspicion(FILTER)
    runs = {"random": ({"method": "random"}, "influence")}
    runs |= {scorer: ({"method": "top_k"}, scorer) for scorer in cell.scored if scorer != "random"}
    if not end:
        runs |= {name: ({"method": name, **given}, "influence") for name, given in FEATURED.items()}
    for name, (selector, scorer) in runs.items():
        found[f"{name}{end}"].append(cell.chosen(selector, scorer, None))
        found[f"{name}{end}_filtered"].append(cell.chosen(selector, scorer, kept_K))
    dropped_N = ~np.isin(np.arange(len(cell.wrong_N)), kept_K)
    own = {f"auc_{FILTER}": area(suspicion_N, cell.wrong_N)[0]}
    own |= {"noise_dropped": dropped_N[cell.wrong_N].mean(), "clean_dropped": dropped_N[~cell.wrong_N].mean()}
    for method in names(NoiseFilter):
        if method != FILTER and not end and (method != "trajectory" or cell.visits is not None):
            rest_K, other_N = cell.suspicion(method, drop=SHARE)
            found[f"influence_{method}"].append(cell.chosen({"method": "top_k"}, "influence", rest_K))
            own[f"auc_{method}"] = area(other_N, cell.wrong_N)[0]
    return {f"{name}{end}": value for name, value in own.items()}


def run(data: Path, work: Path, seeds: list[int], *, quick: bool) -> dict[str, Any]:
    """Run every cell and return the figures."""
    tasks, model = read_tasks(data), (data / "stories260k").resolve()
    served = tuple(name for name in names(Scorer) if name not in (*ELSEWHERE, "random"))
    scorers = QUICK if quick else served
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    own: dict[str, list[float]] = defaultdict(list)
    for category in draw_categories(tasks, 3)[: 1 if quick else 3]:
        for seed in seeds:
            for within in (False,) if quick else (False, True):
                folder = work / f"{category.replace(' ', '-').lower()}-{seed}-{'within' if within else 'whole'}"
                if not folder.is_dir():
                    write_cell(folder, tasks, category, seed, 3 if quick else 8)
                    shuffle_answers(folder, seed, within=within)
                used = ("influence",) if within else scorers
                cell = Cell(folder, model, seed, used, visited=not (quick or within))
                for name, value in arms(cell, found, "_within" if within else "").items():
                    own[name].append(value)
                found["pool_within" if within else "pool"].append(cell.wrong_N)
                Console(stderr=True).print(f"{category}, seed {seed}, {'within' if within else 'whole'}: done")
    figures: dict[str, Any] = {f"noise_{name}": interval(cells) for name, cells in found.items()}
    for name, cells in found.items():
        if f"{name}_filtered" in found:
            figures[f"filtered_minus_{name}"] = interval(found[f"{name}_filtered"], cells)
    figures |= {name: round(float(np.mean(values)), 3) for name, values in own.items()}
    figures |= {"cells": len(found["pool"]), "seeds": seeds, "rows": int(np.mean([len(c) for c in found["pool"]]))}
    return figures


def as_table(figures: dict[str, Any]) -> Table:
    """Return the shares of noise, and the filtered ones beside them."""
    table = Table("chosen by", "noise", "filtered", "difference", title="Share of noise among the chosen, 95 %")
    for key, value in figures.items():
        name = key.removeprefix("noise_")
        if key != name and isinstance(value, list) and not name.endswith("_filtered"):
            beside = [figures.get(f"noise_{name}_filtered"), figures.get(f"filtered_minus_{name}")]
            shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*item) if item else "" for item in (value, *beside)]
            table.add_row(name, *shown)
    return table


def main() -> None:
    """Parse the command line, run, print the table and the figures."""
    parser = Options(__doc__, "one category, few scorers, no training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--work", type=Path, default=None, help="keep the stores here")
    options = parser.read()
    work = options.work or Path(tempfile.mkdtemp())
    figures = run(options.data, work, options.seeds, quick=options.quick)
    Console(width=120).print(as_table(figures))
    if options.work is None:
        shutil.rmtree(work, ignore_errors=True)
    report("noise", figures)


if __name__ == "__main__":
    main()
