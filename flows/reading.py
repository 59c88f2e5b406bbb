"""What a way of choosing reads, told from its settings: scores that nothing reads would be paid for in vain."""

from __future__ import annotations

from data_contracts.config import SelectConfig
from data_contracts.method import find, name_in, resolve
from stages.mix.mixture import Mixture
from stages.select.noise import NoiseFilter
from stages.select.selector import Selector


def reads_scores(select: SelectConfig) -> bool:
    """Return whether scores, or the features that scoring leaves, decide what is selected."""
    if select.count == 0:
        return False  # no row of the pool is chosen
    if resolve(Selector, select.selector, "select.selector").needs():
        return True
    if select.noise is not None and resolve(NoiseFilter, select.noise, "select.noise").needs_scores:
        return True
    if select.mixture is None:
        return False
    mixture = find(Mixture, name_in(select.mixture, "select.mixture"))
    return bool(mixture.reads & {"scores", "features"})
