"""How much may be chosen: a share of the pool's rows, a number of rows, or a number of tokens.

A quota is filled from the best row down. A token quota stops at the first row that does not fit: a later, shorter row
is not preferred to a better, longer one, and the result is a prefix of the ranking. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_contracts.config import SelectConfig
from data_contracts.errors import BudgetError, ConfigError


@dataclass(frozen=True)
class Quota:
    """At most `rows` rows or `tokens` tokens; exactly one of them is set. `asked` says what the user wrote."""

    rows: int | None
    tokens: int | None
    asked: str

    @classmethod
    def of(cls, config: SelectConfig, usable: int) -> Quota:
        """Return the quota that `config` asks of a pool of `usable` rows.

        A fraction is of the usable rows, rounded to the nearest whole, at least one. Raises `ConfigError` where none
        of fraction, count and tokens is set.
        """
        if config.fraction is not None:
            rows = max(1, int(config.fraction * usable + 0.5))
            return cls(rows, None, f"{config.fraction:.4g} of {usable} rows")
        if config.count is not None:
            return cls(config.count, None, f"{config.count} rows")
        if config.tokens is not None:
            return cls(None, config.tokens, f"{config.tokens} tokens")
        raise ConfigError(
            "`select` says how much to choose", "none of fraction, count, tokens is set", "set `select.fraction: 0.1`"
        )

    def fill(self, order: np.ndarray, lengths_N: np.ndarray | None) -> np.ndarray:
        """Return the prefix of `order` (row numbers, best first) that fits.

        Raises `BudgetError` where not even the best row fits, `ConfigError` for a token quota without lengths.
        """
        if self.rows is not None:
            return order[: self.rows]
        if lengths_N is None:
            raise ConfigError("a token budget needs each row's length", "there are only scores", "give `select.count`")
        assert self.tokens is not None
        fits = int(np.searchsorted(np.cumsum(lengths_N[order], dtype=np.int64), self.tokens, side="right"))
        if not fits and len(order):
            raise BudgetError(
                f"the best row fits the budget of {self.tokens} tokens",
                f"it has {int(lengths_N[order[0]])}",
                "raise `select.tokens`",
            )
        return order[:fits]

    def wants_more(self, taken: np.ndarray, lengths_N: np.ndarray | None) -> bool:
        """Return whether the quota would have taken more rows than there were."""
        if self.rows is not None:
            return len(taken) < self.rows
        assert lengths_N is not None
        assert self.tokens is not None
        return int(lengths_N[taken].sum(dtype=np.int64)) < self.tokens
