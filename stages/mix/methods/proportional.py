"""As the pool: each part gets the share it has there. The baseline of every mixture."""

from __future__ import annotations

from stages.mix.mixture import Given, Mixed, Mixture


class Proportional(Mixture):
    """The prior itself."""

    supported = True

    def mix(self, given: Given) -> Mixed:
        """Return each part's share of the pool."""
        return Mixed(given.prior)
