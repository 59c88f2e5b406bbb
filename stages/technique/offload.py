"""What waits in main memory: activations between the two passes, and AdamW's moments between updates.

Both are copies, so what is learnt is the same to the bit. Activations leave as a forward pass saves them and come back
one operator at a time; weights, and tensors too small to be worth a copy, stay. A parameter's moments come to its
device for its own update alone. Where they wait is an argument: main memory beside an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.adamw import adamw

from stages.technique.states import HeldAdamW

LEAST_BYTES = 1024
"""A smaller tensor stays: its copy would take longer than it is worth."""


def room(like: Tensor, host: torch.device) -> Tensor:
    """Return room for a tensor on `host`, in pages that an accelerator can read by itself."""
    pinned = like.device.type == "cuda" and host.type == "cpu"
    return torch.empty(like.shape, dtype=like.dtype, device=host, pin_memory=pinned)


class Offloading(saved_tensors_hooks):
    """A context around forward passes of `model`, whose saved tensors wait on `host`."""

    def __init__(self, model: nn.Module, host: str) -> None:
        self._host = torch.device(host)
        self._stay = {item.untyped_storage()._cdata for item in (*model.parameters(), *model.buffers())}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.numel() * tensor.element_size() < LEAST_BYTES or tensor.untyped_storage()._cdata in self._stay:
            return tensor
        return tensor.device, room(tensor, self._host).copy_(tensor, non_blocking=tensor.device.type == "cuda")

    def _unpack(self, packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, waiting = packed
        return waiting.to(device, copy=True, non_blocking=device.type == "cuda")


class HostAdamW(HeldAdamW):
    """AdamW whose float32 moments wait on `host`; torch's own update, one tensor at a time, to the bit."""

    def __init__(self, params: Iterable[Any], *, host: str = "cpu", **settings: Any) -> None:
        super().__init__(params, **settings)
        self.host = torch.device(host)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        return {"step": 0} | {name: room(parameter, self.host).zero_() for name in _MOMENTS}

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter; its moments come near for as long as that takes."""
        near = [torch.empty_like(parameter).copy_(state[name], non_blocking=True) for name in _MOMENTS]
        taken, (beta1, beta2) = torch.tensor(float(state["step"] - 1)), group["betas"]
        assert parameter.grad is not None
        adamw(
            [parameter], [parameter.grad], [near[0]], [near[1]], [], [taken], foreach=False, fused=False,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for name, value in zip(_MOMENTS, near, strict=True):
            state[name].copy_(value)


_MOMENTS = ("exp_avg", "exp_avg_sq")
