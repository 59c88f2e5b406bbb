"""Whether a metric is better low or high, told from its name only where the name is certain.

A guess that is wrong keeps the worst checkpoint and stops on improvement; so a name that does not end in a word with
one meaning is refused before any training starts, and the reader is asked to say it.
"""

from __future__ import annotations

import re
from typing import Literal

from data_contracts.errors import ConfigError

Direction = Literal["minimise", "maximise"]

LOWER = ("loss", "perplexity", "ppl", "error", "nll", "cross_entropy", "wer", "cer", "rmse", "mse", "mae")
HIGHER = ("accuracy", "acc", "exact_match", "f1", "precision", "recall", "auc", "bleu", "rouge")
QUALIFIERS = ("mean", "avg", "none", "macro", "micro", "weighted", "norm")


def direction_of(metric: str, given: Direction | None = None) -> Direction:
    """Return the direction in which `metric` improves: the one `given`, else the one its name is certain about.

    A name is certain when its last word, qualifiers such as `macro` aside, is one of `LOWER` or `HIGHER`
    (`eval_target_loss`, `f1[macro]`). Raises `ConfigError` for any other name given without a direction.
    """
    if given is not None:
        return given
    words = re.findall(r"[a-z0-9]+", metric.lower())
    while words and words[-1] in QUALIFIERS:
        words.pop()
    for direction, names in (("minimise", LOWER), ("maximise", HIGHER)):
        if any(words[-len(parts) :] == parts for parts in (name.split("_") for name in names)):
            return direction  # type: ignore[return-value]
    raise ConfigError(
        f"the direction in which `{metric}` improves is known before training starts",
        f"the name {metric!r} does not tell whether lower or higher is better",
        "set `govern.direction: minimise` or `govern.direction: maximise`",
    )
