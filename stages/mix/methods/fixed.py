"""Shares by hand: a weight for each part that is trained on."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError
from data_contracts.method import nearest
from stages.mix.mixture import Given, Mixed, Mixture, normalised


class Fixed(Mixture):
    """The shares that the configuration names; a part it does not name gets none."""

    supported = True

    shares: dict[str, float] = Field(min_length=1, description="Weight of each source, at least 0; scaled to sum to 1.")

    def mix(self, given: Given) -> Mixed:
        """Return the weights, scaled. Raises `ConfigError` for a source that the pool lacks, or impossible weights."""
        unknown = sorted(set(self.shares) - set(given.parts))
        if unknown:
            raise ConfigError(
                "`select.mixture.shares` names sources of the pool",
                f"the pool has no source {unknown[0]!r}",
                nearest(unknown[0], list(given.parts)),
            )
        weight_P = np.array([self.shares.get(part, 0.0) for part in given.parts])
        if not np.isfinite(weight_P).all() or weight_P.min() < 0 or weight_P.sum() <= 0:
            raise ConfigError(
                "`select.mixture.shares` holds weights of at least 0, one of them above", str(self.shares), "mend them"
            )
        return Mixed(normalised(weight_P))
