"""Frozen linear layers in four bits (NF4), for passes that leave them as they are: an eighth of float32's memory.

Weights alone are quantised, blocks of 64 with a scale each, and are dequantised layer by layer where they are used, in
the activations' own precision, so a loss stays smooth in everything else: finite differences need that. What is
quantised is another model, a little; its own gradients and losses are what is read then.
Source: Dettmers et al. 2023 (QLoRA), section 3; made by bitsandbytes, on any device it has kernels for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from data_contracts.errors import MethodError


def hold_in_nf4(model: Any) -> int:
    """Replace every frozen linear layer but the output head by its four-bit form, in place; return how many.

    Raises `MethodError` where bitsandbytes is not installed or the model has no frozen linear layer.
    """
    if find_spec("bitsandbytes") is None:
        raise MethodError(
            "bitsandbytes is installed, to hold frozen layers in four bits",
            "it is not",
            "pip install 'lazytrain[quantised]'",
        )
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    from stages.model.loss import plain

    head = plain(model).get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head and not any(p.requires_grad for p in child.parameters())
    ]
    if not found:
        raise MethodError(
            "a model with frozen linear layers",
            "all of its linear layers train",
            "use a checkpoint trained with `lora`",
        )
    for parent, name, layer in found:
        weight = layer.weight
        quantised = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        quantised.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4")
        quantised.bias = layer.bias
        setattr(parent, name, quantised.to(weight.device))
    return len(found)
