"""What does each policy lose against hindsight? Planted curves with noise: regret in nats and in FLOPs.

Shapes, each with random constants: `productive` (a power law over the whole budget), `plateau`, `rise` (over-fit after
an optimum), and `drop` (each new choice of data takes something off, less each time, and costs FLOPs; the policy also
decides between segments of eight evaluations, and closes with a decay of 15 % of what was spent, on the same data). A
policy sees losses with noise of 2 or 10 millinats and keeps the checkpoint that looks best. Figures, each a mean (and
the worst):

    nats     true loss of what is kept less the lowest that the budget could reach
    flops    FLOPs spent less those at which hindsight stops, as a share of the budget
    priced   loss + price × FLOPs, less its lowest in hindsight; the whole budget is priced at 0.05 nats;
             less than patience: mean of the paired differences and their 95 % interval

Hindsight is exact: a search over all stopping points, for `drop` over all lengths of all segments. The policies'
constants were chosen by `priced` on other seeds (`--develop` prints them again) and are frozen in `FROZEN`. The rungs
and medians of `asha` and `median_stop` come from 16 further curves of the same shape and noise, run to the end (of
`drop`: through four rounds).

    python -m benchmarks.governor [--quick] [--develop]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from data_contracts.cost import Budget
from data_contracts.method import resolve
from stages.governor.policy import BETWEEN, Policy
from stages.governor.state import State

STEPS, UNIT, PRICE, SEGMENT, DECAY = 40, 10**12, 0.05, 8, 0.15
"""Evaluations that the budget affords, FLOPs between two, nats the budget is worth, evaluations a segment, closing."""
SHAPES, NOISES, RECORDS = ("productive", "plateau", "rise", "drop"), (0.002, 0.01), 16
DEVELOP, JUDGE, RECORDED = 1, 4, 3
"""First number of a seed: curves for choosing constants, for judging, and for the records never meet."""
INSIDE = frozenset({"continue", "end"})

GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "fixed_rounds": {"rounds": (1, 2, 3, 4)},
    "patience": {"patience": (1, 2, 3, 5, 8)},
    "share_past_best": {"share": (0.1, 0.2, 0.35, 0.5), "least": (2, 3)},
    "asha": {"grace_flops": (4 * UNIT, 8 * UNIT), "reduction": (1.5, 2.0, 4.0)},
    "median_stop": {"grace_flops": (4 * UNIT, 8 * UNIT, 16 * UNIT)},
    "marginal_gain": {"window": (5, 8), "min_gain_nats": (0.005, 0.01, 0.02, 0.04), "robust": (False, True)},
    "gain_left": {"min_gain_nats": (0.005, 0.01, 0.02), "level": (0.2, 0.5, 0.8)},
}
FROZEN: dict[str, dict[str, Any]] = {
    "fixed_rounds": {"rounds": 4},
    "patience": {"patience": 5},
    "share_past_best": {"share": 0.2, "least": 3},
    "asha": {"grace_flops": 8 * UNIT, "reduction": 1.5},
    "median_stop": {"grace_flops": 16 * UNIT},
    "marginal_gain": {"window": 5, "min_gain_nats": 0.04, "robust": False},
    "gain_left": {"min_gain_nats": 0.005, "level": 0.2},
}


@dataclass(frozen=True)
class Planted:
    """A curve whose truth is known: loss after n evaluations (n from 0), or the drops of `drop`."""

    shape: str
    noise: float
    truth_N: np.ndarray
    drops_K: np.ndarray
    speed: float
    cost: int
    seed: tuple[int, ...]

    @classmethod
    def draw(cls, shape: str, noise: float, seed: tuple[int, ...]) -> Planted:
        """Draw the constants of a shape."""
        rng = np.random.default_rng(seed)
        n = np.arange(STEPS + 1) / STEPS
        truth: np.ndarray
        floor = rng.uniform(1.9, 2.1)  # runs of one task: what `asha` and `median_stop` compare is comparable
        drops_K: np.ndarray = np.zeros(0)
        cost = 0
        speed = rng.uniform(1.5, 4.0)
        if shape == "productive":
            truth = floor + rng.uniform(0.3, 0.8) * (n + 0.02) ** -rng.uniform(0.2, 0.6)
        elif shape == "plateau":
            truth = floor + rng.uniform(0.3, 1.0) * np.exp(-n / rng.uniform(0.04, 0.15))
        elif shape == "rise":
            best, fall = rng.uniform(0.15, 0.6), rng.uniform(0.3, 1.0)
            truth = floor + fall * np.exp(-n / (best / 3)) + rng.uniform(0.1, 0.6) * np.maximum(0, n - best) ** 1.3
        else:
            truth = np.full(STEPS + 1, floor + 1.0)
            drops_K = rng.uniform(0.2, 0.6) * rng.uniform(0.25, 0.8) ** np.arange(STEPS)
            cost = int(rng.integers(1, 4))
        return cls(shape, noise, truth, drops_K, speed, cost, seed)

    def draws(self) -> np.ndarray:
        """Return the noise of each evaluation."""
        return self.noise * np.random.default_rng([*self.seed, 9]).standard_normal(2 * STEPS)

    def hindsight(self) -> tuple[float, float, int]:
        """Return (lowest loss within the budget, lowest loss + price, evaluations' FLOPs at the latter)."""
        if self.shape != "drop":
            priced_N = self.truth_N + PRICE * np.arange(STEPS + 1) / STEPS
            at = int(np.argmin(priced_N))
            return float(self.truth_N.min()), float(priced_N[at]), at
        reached = self._best_by_spending()
        priced_N = reached + PRICE * np.arange(STEPS + 1) / STEPS
        at = int(np.argmin(priced_N))
        return float(reached.min()), float(priced_N[at]), at

    def _best_by_spending(self) -> np.ndarray:
        """Return the lowest loss for each number of units spent, over all lengths of all segments (a DP)."""
        start = float(self.truth_N[0])
        best_N = np.array([start - self._gain(0, n) for n in range(STEPS + 1)])
        layer_N, choice = best_N.copy(), 0
        while (choice + 1) * (self.cost + 1) <= STEPS:
            choice += 1
            following_N = np.full(STEPS + 1, np.inf)
            for spent, length in itertools.product(range(STEPS + 1), range(1, STEPS)):
                total = spent + self.cost + length
                if total <= STEPS:
                    following_N[total] = min(following_N[total], layer_N[spent] - self._gain(choice, length))
            layer_N = following_N
            best_N = np.minimum(best_N, layer_N)
        return best_N

    def _gain(self, choice: int, length: int) -> float:
        return float(self.drops_K[choice] * (1 - np.exp(-length / self.speed)))


@dataclass(frozen=True)
class Outcome:
    """Regrets of one policy on one curve."""

    nats: float
    flops: float
    priced: float


def rows_of(losses: list[float], noise: float, first: int) -> list[dict[str, Any]]:
    """Return curve rows of a segment whose evaluations are `losses`."""
    return [
        {"step": first + i, "flops": i * UNIT, "validation_loss": loss, "validation_se": noise}
        for i, loss in enumerate(losses, start=1)
    ]


def run(policy: Policy, planted: Planted) -> Outcome:
    """Let a policy govern a planted curve to its end and return what it lost."""
    kept, spent, _ = (_rounds if planted.shape == "drop" else _once)(policy, planted)
    lowest, priced, at = planted.hindsight()
    return Outcome(kept - lowest, (spent - at) / STEPS, kept + PRICE * spent / STEPS - priced)


Seen = list[tuple[int, float]]
"""FLOPs and loss of each evaluation, as the policy saw it."""


def _once(policy: Policy, planted: Planted) -> tuple[float, int, Seen]:
    """Return (true loss of what is kept, FLOPs spent in evaluations' units, what was seen) of one segment."""
    noise_N = planted.draws()
    seen: list[float] = []
    for n in range(1, STEPS + 1):
        seen.append(float(planted.truth_N[n] + noise_N[n]))
        state = State.from_rows([rows_of(seen, planted.noise, 0)], horizon=(STEPS - n) * UNIT)
        left = Budget(flops=(STEPS - n) * UNIT)
        if n < STEPS and policy.decide(state, left, INSIDE).action == "end":
            break
    log = [(n * UNIT, loss) for n, loss in enumerate(seen, start=1)]
    return float(planted.truth_N[1 + int(np.argmin(seen))]), len(seen), log


def _rounds(policy: Policy, planted: Planted) -> tuple[float, int, Seen]:
    """The same of segments, with decisions inside and between them; each starts where the one before ended."""
    base, choice, inside, spent, count = float(planted.truth_N[0]), 0, 0, 0, 0
    segments: list[list[dict[str, Any]]] = []
    actions = ["warmup"]
    best_seen, best_true, noise_N = np.inf, base, planted.draws()
    log: Seen = []
    length, decays = SEGMENT, False
    while spent < STEPS:
        seen: list[float] = []
        for _ in range(min(length, STEPS - spent)):
            inside, spent, count = inside + 1, spent + 1, count + 1
            true = base - planted._gain(choice, inside)
            seen.append(float(true + noise_N[count]))
            log.append((spent * UNIT, seen[-1]))
            if seen[-1] < best_seen:
                best_seen, best_true = seen[-1], true
            rest = 0 if decays else min(length - len(seen), STEPS - spent)
            state = State.from_rows([rows_of(seen, planted.noise, 0)], horizon=rest * UNIT)
            if rest and policy.decide(state, Budget(flops=(STEPS - spent) * UNIT), INSIDE).action == "end":
                break
        segments.append(rows_of(seen, planted.noise, SEGMENT * len(segments)))
        if spent >= STEPS or decays:
            break
        state = State.from_rows(
            segments,
            actions=actions,
            horizon=min(SEGMENT, STEPS - spent) * UNIT,
            reselect_flops=planted.cost * UNIT,
        )
        action = policy.decide(state, Budget(flops=(STEPS - spent) * UNIT), BETWEEN).action
        actions.append(action)
        if action == "reselect":
            base, choice, inside, spent = base - planted._gain(choice, inside), choice + 1, 0, spent + planted.cost
        elif action == "anneal":
            length, decays = max(1, round(DECAY * spent)), True
        elif action != "continue":
            break
    return best_true, min(spent, STEPS), log


@cache
def records(shape: str, noise: float) -> tuple[dict[str, Any], ...]:
    """Return whole curves of a shape with noise, as `asha` and `median_stop` read them."""
    whole = resolve(Policy, {"method": "fixed_rounds", "rounds": 4}, "policy")
    out = []
    for seed in range(RECORDS):
        planted = Planted.draw(shape, noise, (RECORDED, SHAPES.index(shape), seed))
        _, _, log = (_rounds if shape == "drop" else _once)(whole, planted)
        out.append({"flops": [flops for flops, _ in log], "values": [loss for _, loss in log]})
    return tuple(out)


def judge(name: str, settings: dict[str, Any], first: int, seeds: int) -> dict[str, list[Outcome]]:
    """Return a policy's outcomes by shape."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for shape, noise in itertools.product(SHAPES, NOISES):
        given = {"curves": records(shape, noise)} if name in {"asha", "median_stop"} else {}
        policy = resolve(Policy, {"method": name, **settings, **given}, "policy")
        for seed in range(seeds):
            planted = Planted.draw(shape, noise, (first, SHAPES.index(shape), seed))
            found[shape].append(run(policy, planted))
    return found


def priced_of(found: dict[str, list[Outcome]]) -> np.ndarray:
    """Return the priced regret on each curve, in the order that all policies share, (C,)."""
    return np.array([outcome.priced for outcomes in found.values() for outcome in outcomes])


def develop(seeds: int, tell: Callable[[str], None]) -> None:
    """Print the constants of each policy with the lowest mean priced regret on the development curves."""
    for name, grid in GRID.items():
        scored = []
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            outcomes = itertools.chain(*judge(name, settings, DEVELOP, seeds).values())
            scored.append((float(np.mean([outcome.priced for outcome in outcomes])), settings))
        scored.sort(key=lambda item: item[0])
        tell(f'    "{name}": {scored[0][1]},  # {scored[0][0]:.4f}')


def main() -> None:
    """Judge every policy with its frozen constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 curves a shape and noise instead of 20")
    parser.add_argument("--develop", action="store_true", help="choose the constants again, on the development curves")
    options = parser.parse_args()
    console = Console(width=150)
    if options.develop:
        develop(12, lambda line: console.print(line, highlight=False, soft_wrap=True))
        return
    seeds = 5 if options.quick else 20
    report: dict[str, Any] = {"benchmark": "governor", "curves": seeds * len(SHAPES) * len(NOISES), "policies": {}}
    table = Table("nats, FLOPs", *SHAPES, "priced", "median", "worst", "less than patience")
    usual = priced_of(judge("patience", FROZEN["patience"], JUDGE, seeds))
    for name, settings in FROZEN.items():
        found = judge(name, settings, JUDGE, seeds)
        every_C = priced_of(found)
        by_shape = {
            shape: {
                "nats": round(float(np.mean([o.nats for o in outcomes])), 4),
                "flops": round(float(np.mean([o.flops for o in outcomes])), 3),
                "worst_nats": round(max(o.nats for o in outcomes), 4),
            }
            for shape, outcomes in found.items()
        }
        mean, middle, worst = (round(float(f(every_C)), 4) for f in (np.mean, np.median, np.max))
        less_C = usual - every_C
        reach = 1.96 * float(less_C.std(ddof=1)) / len(less_C) ** 0.5
        less = [round(float(less_C.mean()) + side * reach, 4) for side in (0, -1, 1)]
        report["policies"][name] = {
            "priced": mean,
            "median_priced": middle,
            "worst_priced": worst,
            "less_than_patience": less,
            **by_shape,
        }
        cells = [f"{figures['nats']:.4f}, {figures['flops']:+.2f}" for figures in by_shape.values()]
        span = f"{less[0]:+.4f} [{less[1]:+.4f}, {less[2]:+.4f}]"
        table.add_row(name, *cells, f"{mean:.4f}", f"{middle:.4f}", f"{worst:.4f}", span)
    console.print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
