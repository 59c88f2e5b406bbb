"""Whether a technique's layer names exist in the model, before any weight is loaded.

A name that matches nothing would otherwise train with the adapters that are left, and say nothing.
"""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from data_contracts.errors import MethodError
from stages.technique.base import Technique


def check_targets(technique: Technique, model: Any) -> None:
    """Check `target_modules` of `technique` against `model`, which may stand on the meta device.

    A name matches a module that is called so, or whose dotted path ends in it. Raises `MethodError` with the nearest
    name and the names of all linear layers.
    """
    paths = [name for name, _ in model.named_modules()]
    known = linear_names(model)
    for target in getattr(technique, "target_modules", ()):
        if any(path == target or path.endswith(f".{target}") for path in paths):
            continue
        close = difflib.get_close_matches(target, known, n=1, cutoff=0.5)
        raise MethodError(
            f"every `target_modules` of {type(technique).name()} names a module of {type(model).__name__}",
            f"'{target}' matches no module",
            (f"did you mean '{close[0]}'? " if close else "") + f"linear layers found: {', '.join(known)}",
        )


def linear_names(model: Any) -> list[str]:
    """Return the last names of the model's linear layers but its output head, in the model's order."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    names = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]
    return list(dict.fromkeys(names))
