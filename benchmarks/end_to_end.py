"""What the whole gives: every way of choosing, under a fixed schedule and governed, at one budget of FLOPs.

Each arm runs the pipeline's own loop under the same budget for all that it does: warm-up, scoring, probes, training and
validation. Checkpoints are chosen on a validation split that no arm trains on; the holdout is read once. No content
stands on two sides.

Pools: *planted* (a tenth is of the target's kind), *by task* (no task stands on two sides) and *web* (text without
categories, no document on two sides). In the latter two there is little or nothing to choose.

Arms: `full` (all of the pool, again and again), `random` (fresh rows by chance), `bm25`, `influence` (static),
`cascade` (bm25, then influence), `target` (its rows alone), `target+random`, `target+bm25`, `oracle` (the pool's rows
of the target's kind alone), `dynamic` (the cascade anew each round), `fixed_steps` (influence anew for the whole pool
after every fourth of the steps, the schedule of DataFlex), `lazytrain` (`auto` over its named arms) and
`target+lazytrain`. Each under a *fixed* schedule, which uses the budget up, and *governed* by the default policy,
which may stop; so that what choosing does is read at an equal governor and what the governor does at equal data. The
rate is the best of the grid on validation under the fixed schedule, two segments on one choice; the governed arm
trains at it in at most three, and may choose anew between them.

Tier A (default) is a model of 260,000 parameters, all arms and pools: a check of mechanisms. Tier B (`--tier b`) is
SmolLM2-135M-Instruct (or `--model`), trained with `lora`: planted pools, one pass over 240 rows, `full`, `random`,
`lazytrain` and `oracle` at one rate, and beside loss the share of holdout questions whose greedy answer is the
reference's (`accuracy`).

Figures of an arm and pool: `nats_vs_random` (holdout, at the same governor; 95 %, bootstrap of cells, then of tasks),
`nats_vs_fixed` (what the governor does at equal data),
`flops_to_full_loss_ratio` (FLOPs spent until validation is at the lowest that `full` under the fixed schedule reached,
over the FLOPs that `full` had spent there; geometric mean of the cells that reached it, and how many did), the same
`amortised` (what choosing cost left out), `optimism` (holdout less validation), passes spent, and those spent with all
of the grid (`tuned`); seconds.

Figures of `lazytrain` and a pool: `decisions_right` (cells in which it chose where the best of bm25, cascade and
influence ended below chance under the fixed schedule, or declined where none did; a difference below 0.01 nats makes
either right), `declining_cost` (what it spent on choosing where it declined, of the budget, the most) and
`saving_of_oracle` (1 less its ratio, over 1 less the oracle's). `elsewhere` is `lazytrain` against chance over all
cells whose pool is not planted.

    python -m benchmarks.end_to_end [--quick] [--tier b] [--model F] [--seeds N ...] [--minutes M] [--work F]
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cells import (
    ARITHMETIC,
    Tasks,
    draw_categories,
    mean_loss,
    read,
    read_tasks,
    real_model,
    small_settings,
    write,
    write_planted,
    write_splits,
    write_web,
)
from benchmarks.chain import report
from benchmarks.end_to_end_figures import FoundCell, decided, figures_of, less, table_of
from benchmarks.options import Options
from benchmarks.trials import Cell
from data_contracts.config import ARMS as NAMED
from flows.race import NEVER_ENDS

WARM_UP_ROWS, SHARE = 32, 0.1
PLANTED, BY_TASK, WEB = "planted", "by task", "web"
GOVERNORS = ("fixed", "governed")
CHANCE = {"selector": {"method": "random"}, "fraction": 1.0}
ALL: dict[str, Any] = {"select": CHANCE, "train": {"epochs": 40.0}}


def alone(name: str) -> dict[str, Any]:
    """Return the sections of one way of choosing, used untried."""
    return {"auto": {"arms": [name]}}


TARGET = {"include_target": True}
ARMS: dict[str, dict[str, Any]] = {
    "full": ALL,
    "random": alone("random"),
    "bm25": alone("bm25"),
    "influence": alone("influence"),
    "cascade": alone("cascade"),
    "target": {"select": {"count": 0, **TARGET}, "train": {"epochs": 40.0}},
    "target+random": {**alone("random"), "select": TARGET},
    "target+bm25": {**alone("bm25"), "select": TARGET},
    "oracle": ALL,
    "dynamic": {
        "score": {"scorer": NAMED["cascade"]["scorer"], "coverage": NAMED["cascade"]["coverage"]},
        "select": {"selector": {"method": "top_k"}, "fraction": 0.1},
        "train": {"epochs": 4.0},
        "govern": {"rounds": 4},
    },
    "fixed_steps": {
        "score": {"scorer": {"method": "influence"}},
        "select": {"selector": {"method": "top_k"}, "fraction": 0.1},
        "train": {"epochs": 40.0},
        "govern": {"rounds": 4},
    },
    "lazytrain": {"auto": {"arms": list(NAMED)}},
    "target+lazytrain": {"auto": {"arms": list(NAMED)}, "select": TARGET},
}


@dataclass(frozen=True)
class Tier:
    """Which arms on which pools, at which rates, and how much of everything.

    Args:
        arms: by name, the governors that it runs under.
        budget: of each run, in passes over the pool.
        sides: rows of each split; the target of a pool by task has fewer.
        sections: of the configuration, over those that all cells share.
        answered: whether the holdout's questions are answered too.
    """

    pools: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    rates: tuple[float, ...]
    budget: float
    sides: Mapping[str, int]
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    answered: bool = False


A = Tier(
    pools=(PLANTED, BY_TASK, WEB),
    arms=dict.fromkeys(ARMS, GOVERNORS),
    rates=(1e-3, 3e-3),
    budget=2.0,
    sides={"target": 16, "validation": 24, "holdout": 80, "pool": 400},
)
QUICK = replace(
    A, pools=(PLANTED,), arms=dict.fromkeys(("full", "random", "bm25", "lazytrain"), GOVERNORS), rates=(3e-3,)
)
B = Tier(
    pools=(PLANTED,),
    arms={"full": ("fixed",), "random": GOVERNORS, "lazytrain": ("governed",), "oracle": ("governed",)},
    rates=(1e-3,),
    budget=1.0,
    sides={"target": 16, "validation": 16, "holdout": 80, "pool": 240},
    sections={
        "plan": {"techniques": [{"method": "lora"}]},
        "evaluate": {"tasks": [{"method": "perplexity"}, {"method": "exact_match", "max_new_tokens": 32}]},
    },
    answered=True,
)


def values_for(model: Path, seed: int, pool: str, rows: int, tier: Tier) -> dict[str, Any]:
    """Return the configuration that all arms of a cell share; in a planted pool a task's rows stand on all sides."""
    shared = small_settings(model, seed, by_task=pool == BY_TASK, warm_up=min(1.0, WARM_UP_ROWS / rows))
    values = {
        **shared,
        "train": {**shared["train"], "epochs": 1, "evaluations": 6},
        "govern": {"rounds": 2, "evaluation_share": 0.0},
    }
    return {**values, **{name: {**values.get(name, {}), **part} for name, part in tier.sections.items()}}


def write_oracle(folder: Path, tasks: Tasks, kind: str) -> int:
    """Write the same splits with a pool of the target's kind alone to `folder/oracle`; return its rows."""
    for side in ("target", "validation", "holdout"):
        write(folder / "oracle" / f"{side}.jsonl", read(folder / f"{side}.jsonl"))
    mine = [
        row
        for row in read(folder / "pool.jsonl")
        if (row["task"].startswith("problem ") if kind == ARITHMETIC else row["task"] in tasks[kind])
    ]
    write(folder / "oracle" / "pool.jsonl", mine)
    return len(mine)


def run_arm(
    cell: Cell, name: str, governor: str, rate: float, flops: float, *, answered: bool = False
) -> dict[str, Any]:
    """Run one arm for so many FLOPs and read the holdout with the checkpoint that validation prefers."""
    sections = {key: dict(part) for key, part in ARMS[name].items()}
    sections.setdefault("train", {})["learning_rate"] = rate
    govern = sections.setdefault("govern", {})
    if governor == "fixed":
        govern["policy"] = NEVER_ENDS
    else:
        govern.setdefault("rounds", 3)
    began = time.monotonic()
    trial, made = cell.trial(cell.config(flops / cell.pass_flops, sections))
    return {
        "rate": rate,
        "flops": trial.spent,
        "choosing_flops": trial.choosing,
        "chose": trial.chose,
        "seconds": time.monotonic() - began,
        "curve": trial.validated(),
        "losses": cell.losses(made.candidate),
        **({"answers": cell.answers(made.candidate)} if answered else {}),
        "why": trial.decisions[-1].reason,
    }


def run_cell(pool: str, kind: str, seed: int, data: Path, model: Path, work: Path, tier: Tier) -> FoundCell:
    """Run every arm of one cell under its governors, keep in `work` what came of it, and return it."""
    folder, tasks = kept(pool, kind, seed, work).parent, read_tasks(data)
    write_cell(folder, data, tasks, pool, kind, seed, tier)
    cell = Cell(folder, values_for(model, seed, pool, tier.sides["pool"], tier))
    few = write_oracle(folder, tasks, kind) if pool == PLANTED and "oracle" in tier.arms else 0
    oracle = Cell(folder / "oracle", values_for(model, seed, pool, few, tier)) if few else None
    flops, arms = tier.budget * cell.pass_flops, dict[str, dict[str, Any]]()
    for name, governors in tier.arms.items():
        mine = oracle if name == "oracle" else cell
        if mine is None:
            continue
        rate, grid, shown = tier.rates[-1], 0, []
        if "fixed" in governors:
            tried = [run_arm(mine, name, "fixed", rate, flops, answered=tier.answered) for rate in tier.rates]
            best = min(tried, key=lambda item: min(loss for _, loss in item["curve"]))
            rate, grid = best["rate"], sum(item["flops"] for item in tried)
            arms[f"{name}, fixed"] = {**best, "tuned_flops": grid}
        if "governed" in governors:
            governed = run_arm(mine, name, "governed", rate, flops, answered=tier.answered)
            arms[f"{name}, governed"] = {**governed, "tuned_flops": grid + governed["flops"]}
        for governor in governors:
            found = arms[f"{name}, {governor}"]
            right = f", {mean_loss(found['answers']):.1%} right" if tier.answered else ""
            shown.append(f"{governor} {mean_loss(found['losses']):.3f}{right}, {found['why'][:60]}")
        Console(stderr=True).print(f"{pool}, {kind}, {seed}: {name}: {'; '.join(shown)}", soft_wrap=True)
    base = {"base": {"losses": cell.losses(()), "answers": cell.answers(())}} if tier.answered else {}
    for one in (cell, oracle):
        if one is not None:
            one.close()
    found_here = {
        "pool": pool,
        "kind": kind,
        "seed": seed,
        "pass_flops": cell.pass_flops,
        **base,
        "arms": arms,
    }
    kept(pool, kind, seed, work).write_text(json.dumps(found_here), encoding="utf-8")
    for store in folder.rglob(".lazytrain"):
        shutil.rmtree(store, ignore_errors=True)
    return found_here


def write_cell(folder: Path, data: Path, tasks: Tasks, pool: str, kind: str, seed: int, tier: Tier) -> None:
    """Write the splits of one cell."""
    sides = dict(tier.sides)
    if pool == PLANTED:
        write_planted(folder, data, tasks, kind, seed, sides, SHARE)
    elif pool == WEB:
        write_web(folder, data, seed, sides)
    else:
        each = max(1, sides["pool"] // (sum(map(len, tasks.values())) - len(tasks[kind])))
        write_splits(folder, tasks, kind, seed, {"pool": each, "target": 8, "validation": 24, "holdout": 24})


def kept(pool: str, kind: str, seed: int, work: Path) -> Path:
    """Return the file that holds what came of a cell once it is finished."""
    return work / f"{pool}-{kind}-{seed}".replace(" ", "-").lower() / "found.json"


def tasks_of(tasks: Tasks, seeds: list[int], tier: Tier) -> list[tuple[str, str, int]]:
    """Return (pool, kind, seed) of the cells, the kinds of pools in turns."""
    planted = [(PLANTED, kind, seed) for seed in seeds for kind in [*draw_categories(tasks, 2), ARITHMETIC]]
    others = [(BY_TASK, kind, seed) for seed in seeds for kind in draw_categories(tasks, 3)]
    others = [task for seed in seeds for task in [*(one for one in others if one[2] == seed), (WEB, "documents", seed)]]
    if tier.answered:  # of answers that have one right wording
        planted = [task for task in planted if task[1] == "Named Entity Recognition"]
    return [task for pair in zip_longest(planted, others) for task in pair if task and task[0] in tier.pools]


def run(
    data: Path, model: Path, work: Path, tier: Tier, seeds: list[int], minutes: float, most: int | None = None
) -> dict[str, Any]:
    """Take every cell that is finished, run the others while there is time to begin one, and return the figures."""
    began, cells = time.monotonic(), list[FoundCell]()
    for task in tasks_of(read_tasks(data), seeds, tier)[:most]:
        done = kept(*task, work)
        if done.exists():
            cells.append(json.loads(done.read_text(encoding="utf-8")))
        elif time.monotonic() - began < 60 * minutes:
            cells.append(run_cell(*task, data, model, work, tier))
    figures: dict[str, Any] = {}
    for pool in tier.pools:
        those = [cell for cell in cells if cell["pool"] == pool]
        names = [f"{name}, {governor}" for name, governors in tier.arms.items() for governor in governors]
        mine = {arm: figures_of(those, arm) for arm in names if any(arm in cell["arms"] for cell in those)}
        if mine:
            Console(width=220).print(table_of(mine, f"{pool} pools, {tier.budget:g} passes"))
            figures[pool] = {**mine, "decisions": decided(those, tier.budget)}
            if tier.answered:
                figures[pool]["base"] = {
                    what: round(sum(mean_loss(cell["base"][key]) for cell in those) / len(those), 4)
                    for what, key in (("loss", "losses"), ("accuracy", "answers"))
                }
    arms = [cell["arms"] for cell in cells if cell["pool"] != PLANTED]
    if arms:
        nats, interval = less(
            [(arm["lazytrain, governed"]["losses"], arm["random, governed"]["losses"]) for arm in arms]
        )
        figures["elsewhere"] = {"cells": len(arms), "nats_vs_random": nats, "nats_vs_random_interval": interval}
    return figures


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one planted cell, four arms, one rate: about two minutes")
    parser.add_argument("--tier", choices=("a", "b"), default="a", help="a: the small model; b: a real one")
    parser.add_argument(
        "--model", type=Path, default=None, help="folder of tier B's model; default: SmolLM2-135M, pulled"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[820, 821, 822], help="of the splits and of every arm")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further cell after so many")
    parser.add_argument("--work", type=Path, default=None, help="keep cells here: those finished stand, others go on")
    given = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).resolve()
        model = given.data / "stories260k"
        if given.tier == "b":
            model = given.model or real_model(Path(scratch) / "model")
        tier = QUICK if given.quick else B if given.tier == "b" else A
        most = 1 if given.quick else None
        report("end_to_end", run(given.data, model, work, tier, given.seeds, given.minutes, most))


if __name__ == "__main__":
    main()
