"""Frozen weights in the precision that they are multiplied in: half their bytes, and the same numbers.

Autocast multiplies in bfloat16 whatever a linear layer holds; a weight that never trains may as well be held so
from the start. Embeddings, norms and a head that shares the embedding's weight are read in float32 and stay so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stages.model.loss import plain


def halve_frozen(model: Any, precision: str) -> None:
    """Hold the frozen linear weights below adapters in bfloat16 where `precision` is "bfloat16"; else change nothing.

    DoRA's weights stay: it adds its update to them in float32.
    """
    if precision != "bfloat16" or not hasattr(model, "peft_config"):
        return
    if any(getattr(config, "use_dora", False) for config in model.peft_config.values()):
        return
    inner = plain(model)
    embedding = inner.get_input_embeddings().weight
    for module in inner.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            weight = module.weight
            if not weight.requires_grad and weight is not embedding:
                weight.data = weight.data.to(torch.bfloat16)
