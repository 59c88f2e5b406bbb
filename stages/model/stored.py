"""Tensors to a safetensors file one after another: no more than one is held beside those that are given.

The bytes are those of `safetensors.torch.save_file`: wider types first, then by name. A tensor that is spread over
ranks is gathered when its turn comes; every rank calls then, and the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stages.model.shards import whole

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ORDER = ["BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64"]
"""As the library orders types; wider ones are written first."""


def store(path: Path | None, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` by name to `path`; None only takes part in gathering those that are spread."""
    names = sorted(tensors, key=lambda name: (-_ORDER.index(TYPES[tensors[name].dtype]), name))
    if path is None:
        for name in names:
            whole(tensors[name])
        return
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        item = tensors[name]
        end = start + item.numel() * item.element_size()
        header[name] = {"dtype": TYPES[item.dtype], "shape": list(item.shape), "data_offsets": [start, end]}
        start = end
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for name in names:
            found = whole(tensors[name].detach()).to("cpu").contiguous()
            file.write(found.reshape(-1).view(torch.uint8).numpy().data)  # its bytes, not a copy
