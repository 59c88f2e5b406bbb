"""The mixture of a selection: made where the configuration asks for one, from no more than its method reads.

So a mixture by hand is made once a run, and one that follows losses again before every selection.
"""

from __future__ import annotations

from collections.abc import Callable

from data_contracts.config import Config
from data_contracts.method import find
from data_contracts.records import Ref, Result
from stages.mix.mixture import Mixture

READS = {
    "model": ("base", "plan", "checkpoint", "target_tokens"),
    "scores": ("scores",),
    "features": ("features",),
    "example_losses": ("example_losses", "previous"),
}
"""Inputs of the stage mix for each thing that a mixture reads."""


def follows(config: Config) -> bool:
    """Return whether the mixture that `config` asks for follows training, so that it may be another next time."""
    settings = config.select.mixture
    return settings is not None and bool(find(Mixture, str(settings.get("method"))).reads - {"scores", "features"})


def mixed(config: Config, call: Callable[..., Result], **given: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """Return the mixture that `config` asks for; nothing where it asks for none.

    Args:
        config: its `select.mixture` names the method.
        call: calls the stage mix with references by name.
        given: all there is, by input name: pool_tokens, base, plan, checkpoint, target_tokens, scores, features,
            previous (the mixture before this one), and example_losses of the segments since.
    """
    settings = config.select.mixture
    if settings is None:
        return ()
    reads = find(Mixture, str(settings.get("method"))).reads
    names = ["pool_tokens", *(name for read in sorted(reads) for name in READS[read])]
    return call("mix", **{name: given.get(name, ()) for name in names}).ref("mixture")
