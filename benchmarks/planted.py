"""Planted curves whose hindsight is exact, and what a policy that governs one loses.

Shapes, each with random constants: `productive` (a power law over the whole budget), `plateau`, `rise` (over-fit after
an optimum), and `drop` (each new choice of data takes something off, less each time, and costs FLOPs; the policy also
decides between segments of eight evaluations, and closes with a decay of 15 % of what was spent, on the same data). A
policy sees losses with noise of 2 or 10 millinats and keeps the checkpoint that looks best. Hindsight is a search over
all stopping points, for `drop` over all lengths of all segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_contracts.cost import Budget
from stages.governor.policy import BETWEEN, INSIDE, Policy
from stages.governor.state import State

STEPS, UNIT, PRICE, SEGMENT, DECAY = 40, 10**12, 0.05, 8, 0.15
"""Evaluations that the budget affords, FLOPs between two, nats the budget is worth, evaluations a segment, closing."""
SHAPES, NOISES = ("productive", "plateau", "rise", "drop"), (0.002, 0.01)


@dataclass(frozen=True)
class Outcome:
    """Regrets of one policy on one curve."""

    nats: float
    flops: float
    priced: float
    spent: float
    """Of the budget: the share at which it ended."""


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


def rows_of(losses: list[float], noise: float, first: int) -> list[dict[str, Any]]:
    """Return curve rows of a segment whose evaluations are `losses`."""
    return [
        {"step": first + i, "flops": i * UNIT, "validation_loss": loss, "validation_se": noise}
        for i, loss in enumerate(losses, start=1)
    ]


def run(policy: Policy, planted: Planted) -> Outcome:
    """Let a policy govern a planted curve to its end and return what it lost."""
    kept, spent, _ = govern(policy, planted)
    lowest, priced, at = planted.hindsight()
    share = spent / STEPS
    return Outcome(kept - lowest, share - at / STEPS, kept + PRICE * share - priced, share)


def govern(policy: Policy, planted: Planted) -> tuple[float, int, Seen]:
    """Return (true loss of what is kept, FLOPs spent in evaluations' units, what the policy saw)."""
    return (_rounds if planted.shape == "drop" else _once)(policy, planted)


Seen = list[tuple[int, float]]
"""FLOPs and loss of each evaluation, as the policy saw it."""


def _once(policy: Policy, planted: Planted) -> tuple[float, int, Seen]:
    """Govern one segment."""
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
    """Govern segments, with decisions inside and between them; each starts where the one before ended."""
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
