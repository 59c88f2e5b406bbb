"""Do quotes keep what they say? Quote, then run, on planted pools: Brier's score, and what the intervals hold.

Each cell is a planted pool (`cells.write_planted`) of 600 rows, a fifth, a tenth or a twentieth of which (by seed) are
of the target's kind, and one budget, in passes over the pool: one of which a twentieth pays two probes, and one too
small, where words tell alone. A cell is quoted as `lazytrain quote` does it, then run by `auto` (what the quote is
about), by chance and by bm25 (three tenths of the pool), each with the same budget; the store's own past quotes are
then scored. Real rows, a real small model. Constants were settled on seeds 910 to 912.

    python -m benchmarks.quote [--quick] [--seeds N ...] [--budgets B ...] [--work FOLDER]
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cells import ARITHMETIC, draw_categories, read_tasks, small_settings, write_planted
from benchmarks.chain import report
from benchmarks.options import Options
from data_contracts.config_file import parse
from data_contracts.quotes import Hours, Quote
from data_contracts.records import Plan
from data_contracts.store import Store
from flows.calling import call_directly
from flows.past_quotes import Past, past_quotes
from flows.pipeline import first_plan, trained
from flows.pipeline_run import recorded
from flows.quote import quote
from flows.workspace import Workspace
from stages.governor.past import choice, score

SHARES = (0.2, 0.1, 0.05)
SIZES = {"pool": 600, "target": 16, "validation": 12, "holdout": 8}
ARMS: dict[str, Any] = {"random": "random", "bm25": {"name": "bm25", "scorer": {"method": "bm25"}, "fraction": 0.3}}
BUDGETS = (3.0, 0.6)


def values_for(model: Path, seed: int) -> dict[str, Any]:
    """Return the configuration that all runs of a cell share."""
    shared = small_settings(model, seed, by_task=False, warm_up=0.02)
    return {
        **shared,
        "train": {**shared["train"], "learning_rate": 3e-3, "epochs": 1, "evaluations": 4},
        "govern": {"rounds": 2, "evaluation_share": 0.02},
    }


def run_cell(folder: Path, data: Path, kind: str, seed: int, share: float, budgets: list[float]) -> list[Past]:
    """Quote and run one cell at each budget, and return its past quotes."""
    write_planted(folder, data, read_tasks(data), kind, seed, SIZES, share)
    values = values_for((data / "stories260k").resolve(), seed)

    def workspace(**sections: Any) -> Workspace:
        return Workspace(parse({**values, **sections}), folder / "lazytrain.yaml", "lazytrain.yaml")

    store = Store(workspace().address)
    with recorded(workspace(), store, call_directly, "size") as run:
        whole = run.read(first_plan(run, run.call("ingest")), "plan", Plan).pass_flops
    for budget in budgets:
        limits = {"flops": int(budget * whole)}
        asked = workspace(budget=limits, auto={"arms": list(ARMS.values())})
        with recorded(asked, store, call_directly, "quote") as run:
            quote(run)
        for arms in (list(ARMS.values()), *([arm] for arm in ARMS.values())):
            with recorded(workspace(budget=limits, auto={"arms": arms}), store, call_directly, "run") as run:
                trained(run)
    return list(past_quotes(store))


def told(past: Past) -> dict[str, Any]:
    """Return what was quoted and what came, for people and for a file."""
    offer, seconds = past.quote.offer(past.quote.follows), past.hours.seconds[past.quote.follows]
    chosen = choice(past.quote)
    return {
        "follows": past.quote.follows,
        "basis": chosen.basis if chosen else None,
        "probability": chosen.probability.model_dump() if chosen and chosen.probability else None,
        "loss": offer.loss.model_dump() if offer.loss else None,
        "flops": offer.flops.model_dump(),
        "seconds": seconds.model_dump(),
        "probes": past.quote.probe_flops / past.quote.spendable_flops,
        "came": past.came.model_dump() if past.came else None,
    }


def main() -> None:
    """Run the cells and print the scores."""
    parser = Options(__doc__, "one cell")
    parser.add_argument("--seeds", type=int, nargs="+", default=[600, 601, 602])
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument("--kinds", type=int, default=4, help="kinds of target, of four")
    parser.add_argument("--work", type=Path, default=None, help="keep the stores here")
    options = parser.read()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    work = options.work or Path(tempfile.mkdtemp())
    kinds = [*draw_categories(read_tasks(options.data), 3), ARITHMETIC][: 1 if options.quick else options.kinds]
    quotes: list[tuple[Quote, Hours, Any]] = []
    rows = []
    for place, seed in enumerate(options.seeds[: 1 if options.quick else None]):
        for kind in kinds:
            folder = work / f"{kind.replace(' ', '-')}-{seed}"
            for past in run_cell(folder, options.data, kind, seed, SHARES[place % len(SHARES)], options.budgets):
                quotes += [(past.quote, past.hours, past.came)] if past.came else []
                rows.append({"kind": kind, "seed": seed, **told(past)})
                Console(stderr=True, width=200).print(json.dumps(rows[-1]))
            (work / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    figures: dict[str, Any] = {}
    for basis in ("probes", "words"):
        of = [item for item in quotes if (chosen := choice(item[0])) is not None and chosen.basis == basis]
        found = score(of)
        figures[basis] = {**found.model_dump(), "coverage": found.coverage}
    figures["most_probes"] = max(row["probes"] for row in rows)
    report("quote", figures)


if __name__ == "__main__":
    main()
