"""What does each policy lose against hindsight? Planted curves with noise, and recorded real ones.

Figures, each a mean (and the worst):

    nats     true loss of what is kept less the lowest that the budget could reach
    flops    FLOPs spent less those at which hindsight stops, as a share of the budget
    priced   loss + price × FLOPs, less its lowest in hindsight; the whole budget is priced at 0.05 nats;
             less than patience: mean of the paired differences and their 95 % interval

Planted curves (`planted.py`) have an exact hindsight. The policies' constants were chosen by `priced` on planted curves
of other seeds (`--develop` prints them again) and are the policies' defaults but for `FROZEN`, whose FLOPs are shares
of a budget. Two rows more end `marginal_gain` by a share κ of the mean gain, and at the price that they are judged by.
The rungs and medians of `asha` and `median_stop` come from 16 further curves of the same shape and noise, run to the
end.

`--real` judges the same frozen constants on the runs of `real_curves.csv`, which no choice was made on (`recorded.py`),
with all 36 evaluations or `--evaluations` of them. Intervals take runs of one model on one kind of rows as one; `ends`
is the least and the largest share of the budget at which runs of a group ended.

    python -m benchmarks.governor [--quick] [--develop] [--real [--evaluations N]]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planted import NOISES, PRICE, SHAPES, STEPS, UNIT, Outcome, Planted, govern, run
from benchmarks.real_curves import EVALUATIONS
from benchmarks.recorded import GROUPS, Recorded, others
from data_contracts.method import resolve
from stages.governor.policy import Policy

RECORDS = 16
DEVELOP, JUDGE, RECORDED = 1, 4, 3
"""First number of a seed: curves for choosing constants, for judging, and for the records never meet."""

GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "fixed_rounds": {"rounds": (1, 2, 3, 4)},
    "patience": {"patience": (1, 2, 3, 5, 8)},
    "share_past_best": {"share": (0.1, 0.2, 0.35, 0.5), "least": (2, 3)},
    "asha": {"grace_share": (0.1, 0.2), "reduction": (1.5, 2.0, 4.0)},
    "median_stop": {"grace_share": (0.1, 0.2, 0.4)},
    "marginal_gain": {"window": (5, 8), "min_gain_nats": (0.005, 0.01, 0.02, 0.04), "robust": (False, True)},
    "marginal_gain, kappa": {
        "method": ("marginal_gain",), "min_gain_nats": (0.0,), "window": (5, 8), "kappa": (0.05, 0.1, 0.2),
        "kappa_rise": (0.0, 1.0), "consecutive": (1, 3),
    },
    "marginal_gain, price": {
        "method": ("marginal_gain",), "min_gain_nats": (0.0,), "window": (5, 8), "budget_price": (PRICE,),
        "consecutive": (1, 3),
    },
    "gain_left": {"min_gain_nats": (0.005, 0.01, 0.02), "level": (0.2, 0.5, 0.8)},
}  # fmt: skip
FROZEN: dict[str, dict[str, Any]] = {
    "fixed_rounds": {},
    "patience": {},
    "share_past_best": {},
    "asha": {"grace_share": 0.2},
    "median_stop": {"grace_share": 0.4},
    "marginal_gain": {},
    "marginal_gain, kappa": {"method": "marginal_gain", "min_gain_nats": 0.0, "kappa": 0.1, "consecutive": 3},
    "marginal_gain, price": {"method": "marginal_gain", "min_gain_nats": 0.0, "budget_price": PRICE, "consecutive": 3},
    "gain_left": {},
}
"""Settings beside the product's defaults, which are what was chosen on the development curves."""


def policy_of(name: str, settings: dict[str, Any], budget: int, curves: Callable[[], Any]) -> Policy:
    """Return a policy; `grace_share` becomes FLOPs of `budget`, `budget_price` (nats that all of it is worth) a price,
    and `curves` are given to those that compare runs."""
    given = {key: value for key, value in settings.items() if key not in {"grace_share", "budget_price"}}
    if "budget_price" in settings:
        given["price"] = settings["budget_price"] / budget
    if "grace_share" in settings:
        given["grace_flops"] = round(settings["grace_share"] * budget)
    if name in {"asha", "median_stop"}:
        given["curves"] = curves()
    return resolve(Policy, {"method": name, **given}, "policy")


@cache
def records(shape: str, noise: float) -> tuple[dict[str, Any], ...]:
    """Return whole curves of a shape with noise, as `asha` and `median_stop` read them."""
    whole = resolve(Policy, {"method": "fixed_rounds", "rounds": 4}, "policy")
    out = []
    for seed in range(RECORDS):
        _, _, log = govern(whole, Planted.draw(shape, noise, (RECORDED, SHAPES.index(shape), seed)))
        out.append({"flops": [flops for flops, _ in log], "values": [loss for _, loss in log]})
    return tuple(out)


Found = dict[str, list[tuple[Hashable, Outcome]]]
"""By shape or group: what was lost on each curve, and what it belongs together with."""


def judge(name: str, settings: dict[str, Any], first: int, seeds: int) -> Found:
    """Return a policy's outcomes on planted curves by shape."""
    found: Found = defaultdict(list)
    for shape, noise in itertools.product(SHAPES, NOISES):
        policy = policy_of(name, settings, STEPS * UNIT, partial(records, shape, noise))
        for seed in range(seeds):
            planted = Planted.draw(shape, noise, (first, SHAPES.index(shape), seed))
            found[shape].append(((shape, noise, seed), run(policy, planted)))
    return found


def judge_real(name: str, settings: dict[str, Any], curves: Sequence[Recorded]) -> Found:
    """Return a policy's outcomes on recorded curves by group."""
    found: Found = {group: [] for group in GROUPS}
    for curve in curves:
        policy = policy_of(name, settings, curve.rows[-1]["flops"], partial(others, curve, curves))
        found[curve.group].append((curve.kind, curve.lost(curve.govern(policy))))
    return {group: outcomes for group, outcomes in found.items() if outcomes}


def priced_of(found: Found) -> np.ndarray:
    """Return the priced regret on each curve, in the order that all policies share, (C,)."""
    return np.array([outcome.priced for outcomes in found.values() for _, outcome in outcomes])


def less_than(usual: Found, found: Found) -> list[float]:
    """Return (mean, low, high) of the priced regret of `usual` less that of `found`: curves that belong together count
    as one in the 95 % interval."""
    less_C = priced_of(usual) - priced_of(found)
    sums: dict[Hashable, float] = defaultdict(float)
    for (key, _), less in zip(itertools.chain(*found.values()), less_C, strict=True):
        sums[key] += less - less_C.mean()
    error = (len(sums) / (len(sums) - 1) * sum(value**2 for value in sums.values())) ** 0.5 / len(less_C)
    return [round(float(less_C.mean()) + side * 1.96 * error, 4) for side in (0, -1, 1)]


def figures_of(found: Found, usual: Found) -> dict[str, Any]:
    """Return what is told of one policy."""
    every_C = priced_of(found)
    return {
        "priced": round(float(every_C.mean()), 4),
        "median_priced": round(float(np.median(every_C)), 4),
        "worst_priced": round(float(every_C.max()), 4),
        "less_than_patience": less_than(usual, found),
        **{
            group: {
                "nats": round(float(np.mean([o.nats for _, o in outcomes])), 4),
                "flops": round(float(np.mean([o.flops for _, o in outcomes])), 3),
                "worst_nats": round(max(o.nats for _, o in outcomes), 4),
                "ends": [round(f(o.spent for _, o in outcomes), 3) for f in (min, max)],
            }
            for group, outcomes in found.items()
        },
    }


def develop(seeds: int, tell: Callable[[str], None]) -> None:
    """Print the constants of each policy with the lowest mean priced regret on the development curves."""
    for name, grid in GRID.items():
        scored = []
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            scored.append((float(priced_of(judge(name, settings, DEVELOP, seeds)).mean()), settings))
        scored.sort(key=lambda item: item[0])
        tell(f'    "{name}": {scored[0][1]},  # {scored[0][0]:.4f}')


def main() -> None:
    """Judge every policy with its frozen constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 curves a shape and noise instead of 20")
    parser.add_argument("--develop", action="store_true", help="choose the constants again, on the development curves")
    parser.add_argument("--real", action="store_true", help="judge on the recorded curves")
    parser.add_argument("--evaluations", type=int, choices=(4, 6, 9, 12, 18, 36), default=EVALUATIONS)
    options = parser.parse_args()
    console = Console(width=150)
    if options.develop:
        develop(12, lambda line: console.print(line, highlight=False, soft_wrap=True))
        return
    curves = Recorded.all(EVALUATIONS // options.evaluations) if options.real else ()
    seeds = 5 if options.quick else 20

    def judged(name: str, settings: dict[str, Any]) -> Found:
        return judge_real(name, settings, curves) if options.real else judge(name, settings, JUDGE, seeds)

    usual = judged("patience", FROZEN["patience"])
    groups = {group: len(outcomes) for group, outcomes in usual.items()}
    report: dict[str, Any] = {"benchmark": "governor", "real": options.real, "curves": sum(groups.values())}
    report |= {"groups": groups, "policies": {}}
    named = (f"{group} ({count})" for group, count in groups.items())
    table = Table("nats, FLOPs", *named, "priced", "median", "worst", "less than patience")
    for name, settings in FROZEN.items():
        report["policies"][name] = told = figures_of(judged(name, settings), usual)
        cells = [f"{told[group]['nats']:.4f}, {told[group]['flops']:+.2f}" for group in groups]
        less = told["less_than_patience"]
        span = f"{less[0]:+.4f} [{less[1]:+.4f}, {less[2]:+.4f}]"
        three = (f"{told[key]:.4f}" for key in ("priced", "median_priced", "worst_priced"))
        table.add_row(name, *cells, *three, span)
    console.print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
