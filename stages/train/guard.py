"""The guard: bounded control above the optimizer, decided from what each window showed. Pure: no torch, no files.

From loss, gradient norm, update over weight, what an update promises and what was not finite it tells `stable`,
`watch`, `stress` and `recover`, and answers with a factor on the learning rate in [least_rate, 1], a tighter clip, a
window that is not applied, or a state to go back to. Without a sign of trouble the limits are the configuration's own
and training is what it would be without, to the bit. Carrying the answers out is `guarding.py`'s part. The role is that
of LBW-Guard (arXiv 2605.19008), whose mechanism is closed; this one's is its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from data_contracts.config import GuardConfig

Regime = Literal["stable", "watch", "stress", "recover"]
SIGNS = {
    "loss": (4.0, 8.0),
    "rise": (4.0, 9.0),
    "norm": (4.0, 10.0),
    "update": (0.1, 1.0),
    "promise": (0.5, 1.0),
}
"""Where a sign begins, and where it is an alarm by itself: deviations of a window above the smoothed loss; deviations
of the smoothed loss above its lowest; gradient norms over their median; norm of the update over that of the weights;
loss that the update promises to take off over the loss there is. More than all of it cannot come: the step left the
region where the gradient says anything (Polyak's bound; Loizou et al. 2021, arXiv 2002.10542, for stochastic steps)."""
OVERSHOT = {"update", "promise"}
PROMISE, LEAST_LOSS = 0.25, 1.0
"""To what share of the loss a rate is brought that promised too much; below a nat, that nat counts."""
SMOOTH = 0.2
SHARE = math.sqrt(SMOOTH / (2 - SMOOTH))
"""Weight of a window in the smoothed loss, a mean of 9 windows, and its deviation over that of a window: a third."""
LEAST_DEVIATION = 0.05
"""Of a window's loss, as a share of the smoothed one or of a nat: the first windows may look more alike than they are,
and of what is nearly learnt by heart one row may stand out."""
FORGET = 0.01
"""How far the lowest smoothed loss gives way to the present one at a window."""
NORMS, FEWEST = 33, 5
"""Gradient norms that the running median is of, and windows before a median or a lowest loss is believed."""
DOWN, UP = 0.5, 1.1
"""Most that the factor on the rate changes in a window."""
USES = 3
"""How often the same state is gone back to before an older one is."""


@dataclass(frozen=True)
class Seen:
    """What one window showed.

    Args:
        loss: mean loss of an answer token, nats, at the weights before the update.
        error: its standard error over the window's documents; None where there is one document.
        norm: of the gradient, before clipping.
        moved: norm of the update over the norm of the weights that it moved; None where nothing moved.
        promised: the update's inner product with the gradient, negated: the loss, nats, that it would take off were the
            loss linear; None where nothing moved.
    """

    loss: float
    error: float | None
    norm: float
    moved: float | None = None
    promised: float | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and gradient were."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def promise(self) -> float:
        """The promised share of the loss."""
        return (self.promised or 0.0) / max(self.loss, LEAST_LOSS)


@dataclass(frozen=True)
class Limits:
    """What holds for the next window: a factor on the rate, the clip, and above which loss or norm it is skipped."""

    scale: float
    clip: float
    loss: float = math.inf
    norm: float = math.inf


@dataclass
class Guard:
    """The state machine; all of its state is plain data.

    Args:
        config: its settings.
        clip: the configuration's largest gradient norm.

    Attributes:
        regime: as of the last window.
        scale, ceiling: factor on the rate, and the most that it recovers to.
        floored: whether even the least factor was found too much; a decay that is due then begins at once.
        wait: calm windows after which the ceiling is doubled.
        calm, alarms: windows in a row without a sign, and with an alarm.
        windows: that the smoothed loss is of, since the weights were last put back.
        level, low: smoothed loss, and its lowest; None before there is one.
        variance: of a window's loss.
        norms: the last gradient norms of windows that were no alarm.
        states: (step, smoothed loss or None before there is one, times gone back to) of the states kept, oldest first.
    """

    config: GuardConfig
    clip: float
    regime: Regime = "stable"
    scale: float = 1.0
    ceiling: float = 1.0
    floored: bool = False
    wait: int = 0
    calm: int = 0
    alarms: int = 0
    windows: int = 0
    level: float = 0.0
    low: float | None = None
    variance: float = 0.0
    norms: list[float] = field(default_factory=list)
    states: list[tuple[int, float | None, int]] = field(default_factory=list)

    @property
    def deviation(self) -> float:
        """Standard deviation of a window's loss."""
        return max(math.sqrt(self.variance), LEAST_DEVIATION * max(self.level, LEAST_LOSS))

    @property
    def usual(self) -> float | None:
        """Median norm of gradients that were not 0, as a slope in bfloat16 may be; None of fewer than `FEWEST`."""
        found = [norm for norm in self.norms if norm > 0]
        return median(found) if len(found) >= FEWEST else None

    def limits(self) -> Limits:
        """Return what holds for the next window."""
        most_loss = self.level + SIGNS["loss"][1] * self.deviation if self.windows else math.inf
        usual, clip = self.usual, self.clip
        if usual is None:
            return Limits(self.scale, clip, most_loss)
        if self.regime == "watch":
            clip = min(clip, 2 * usual)
        elif self.regime == "stress":
            clip = min(clip, usual) / 2
        return Limits(self.scale, clip, most_loss, SIGNS["norm"][1] * usual)

    def see(self, seen: Seen) -> int | None:
        """Take one window in; return the step whose state is to be put back, or None."""
        values = self._values(seen)
        signs = {name for name, value in values.items() if value >= SIGNS[name][0]}
        alarms = {name for name in signs if values[name] >= SIGNS[name][1]}
        if not seen.finite or alarms or (len(signs) > 1 and signs & {"loss", "rise"}):
            return self._alarmed(seen, not seen.finite or bool(alarms & {"loss", "norm"}), bool(alarms & OVERSHOT))
        self.alarms = 0
        self._learn(seen)
        self.scale = max(min(self.scale, self.ceiling), self.scale * DOWN)
        worrying = signs - {"update"}  # adapters and fresh weights move far in good health
        self.calm = 0 if worrying else self.calm + 1
        if self.calm >= self.config.calm_windows:
            self._calmed()
        elif worrying and self.regime == "stable":
            self.regime = "watch"
        return None

    def keep(self, step: int) -> bool:
        """Note that the state of `step` can be put back; return whether it is: not one in trouble."""
        if self.regime in ("watch", "stress"):
            return False
        self.states = [*self.states, (step, self.level if self.windows else None, 0)][-self.config.states :]
        return True

    def new_rows(self) -> None:
        """Forget what losses were usual: other rows come from now on, by design."""
        self.windows, self.low = 0, None

    def _values(self, seen: Seen) -> dict[str, float]:
        """Return how large each sign is in a window."""
        if not seen.finite:
            return {}
        found = {"update": seen.moved or 0.0, "promise": seen.promise}
        if self.windows:
            found["loss"] = (seen.loss - self.level) / self.deviation
        if self.low is not None:
            found["rise"] = (self.level - self.low) / (self.deviation * SHARE)
        if self.usual is not None:
            found["norm"] = seen.norm / self.usual
        return found

    def _learn(self, seen: Seen) -> None:
        """Take a window into what is usual; one far out counts as one at the edge (winsorised)."""
        error = (seen.error or 0.0) ** 2
        if not self.windows:
            self.level, self.variance = seen.loss, max(self.variance, error)
        else:
            far = SIGNS["loss"][0] * self.deviation
            off = max(-far, min(seen.loss - self.level, far))
            weight = max(SMOOTH, 1 / (self.windows + 1))
            self.level += weight * off
            self.variance += weight * (max(off**2, error) - self.variance)
        self.windows += 1
        self.norms = [*self.norms, seen.norm][-NORMS:]
        self.states = [(step, self.level if level is None else level, uses) for step, level, uses in self.states]
        if self.windows >= FEWEST:
            known = self.level if self.low is None else min(self.low, self.level)
            self.low = known + FORGET * (self.level - known)

    def _alarmed(self, seen: Seen, skipped: bool, overshot: bool) -> int | None:
        """Slow down; after `patience` alarms in a row, or an update that overshot, go back to the newest state that was
        no worse.

        A window that was skipped moved nothing. If the next one is in order it was that window's rows, and the rate
        stays; if not it is the weights.
        """
        self.regime, self.calm, self.alarms = "stress", 0, self.alarms + 1
        lasting = self.alarms >= self.config.patience
        ceiling = self.ceiling * DOWN if lasting else self.ceiling
        if seen.promise >= SIGNS["promise"][1]:
            ceiling = min(ceiling, PROMISE * self.scale / seen.promise)
        if ceiling < self.ceiling:
            self._lower(ceiling)
        if self.alarms > 1 or not skipped:
            self.scale = max(self.config.least_rate, self.scale * DOWN)
        if not (lasting or overshot):
            return None
        now = min(seen.loss, self.level) if self.windows and not lasting else seen.loss
        for place in reversed(range(len(self.states))):
            step, level, uses = self.states[place]
            if uses < USES and (level is None or not seen.finite or level <= now):
                self.states = [*self.states[:place], (step, level, uses + 1)]
                self.regime, self.scale, self.alarms = "recover", min(self.scale, self.ceiling), 0
                self.new_rows()
                return step
        if lasting:
            self.alarms = 0
            self.new_rows()
        return None

    def _lower(self, ceiling: float) -> None:
        self.floored = self.floored or ceiling < self.config.least_rate
        self.ceiling = max(self.config.least_rate, ceiling)
        self.wait = 2 * self.wait if self.wait else self.config.wait_windows

    def _calmed(self) -> None:
        """After a row of windows without a sign: leave the regime by one step, or let the rate recover."""
        if self.ceiling < 1 and self.calm >= self.wait:
            self.ceiling, self.calm = min(1.0, 2 * self.ceiling), self.config.calm_windows
            self.floored = False
        if self.scale < 1:
            self.regime, self.scale = "recover", min(self.ceiling, self.scale * UP)
        else:
            self.regime = "stable"

    def state(self) -> dict[str, Any]:
        """Return plain data that `of` reads back."""
        return {name: value for name, value in asdict(self).items() if name not in ("config", "clip")}

    @classmethod
    def of(cls, config: GuardConfig, clip: float, state: Mapping[str, Any]) -> Guard:
        """Return the guard that `state` describes; a new one where it is empty."""
        states = [tuple(item) for item in state.get("states", ())]
        return cls(config, clip, **{**state, "states": states})


def handed_on(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a guard's state holds in the next segment: a rate that it found too large, and since when."""
    if not state or state["ceiling"] == 1:
        return {}
    ceiling, wait = state["ceiling"], state["wait"]
    still = {"floored": True} if state.get("floored") else {}
    return {"regime": "recover", "scale": ceiling, "ceiling": ceiling, "wait": wait} | still
