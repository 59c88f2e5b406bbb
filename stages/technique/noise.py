"""The gradient noise scale tr(Σ)/|G|²: how many answer tokens a step needs before more of them stop helping.

Estimated from squared norms of gradients over two batch sizes: the micro-batches of a window and the window itself.
Both unknowns are averaged before they are divided, because their ratio is biased step by step.
Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. Micro-batches sorted by length are not exchangeable, so
the estimate is somewhat above that of random ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DECAY = 0.9
"""Weight of the past in the running averages; appendix A.1 leaves the horizon open, ten steps suit short segments."""


@dataclass(frozen=True)
class NormPair:
    """Squared gradient norms of one window.

    Args:
        small: mean over micro-batches of |g_i|², each g_i the mean gradient of an answer token of micro-batch i.
        inverse_small: mean over micro-batches of 1 / answer tokens.
        large: |g|² of the whole window.
        inverse_large: 1 / answer tokens of the window.
    """

    small: float
    inverse_small: float
    large: float
    inverse_large: float


@dataclass
class NoiseScale:
    """Running averages of |G|² and tr(Σ). `update` takes a window, `value` is their ratio in answer tokens."""

    square: float = 0.0
    trace: float = 0.0

    def update(self, pair: NormPair) -> None:
        """Take one window: E|g_B|² = |G|² + tr(Σ)/B solved for both unknowns."""
        spread = pair.inverse_small - pair.inverse_large
        if spread <= 0:
            return
        trace = (pair.small - pair.large) / spread
        square = pair.large - trace * pair.inverse_large
        self.square = DECAY * self.square + (1 - DECAY) * square
        self.trace = DECAY * self.trace + (1 - DECAY) * trace

    @property
    def value(self) -> float | None:
        """tr(Σ)/|G|² in answer tokens; None where either average is not above zero."""
        return self.trace / self.square if self.square > 0 and self.trace > 0 else None

    def state(self) -> dict[str, float]:
        """Return the averages, for a snapshot."""
        return {"square": self.square, "trace": self.trace}

    @classmethod
    def of(cls, state: Mapping[str, float]) -> NoiseScale:
        """Return the estimate whose averages `state` gave."""
        return cls(float(state["square"]), float(state["trace"]))
