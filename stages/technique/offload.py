"""What waits in main memory: activations between the two passes, and AdamW's moments between updates.

Both are copies, so what is learnt is the same to the bit. Activations leave as a forward pass saves them and come back
one operator at a time; weights, and tensors too small to be worth a copy, stay. A parameter's moments come to its
device for its own update alone. Where they wait is an argument: main memory beside an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.adamw import adamw

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


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose moments wait on `host`; torch's own update, one tensor at a time.

    A parameter's state holds `step`, `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, host: str = "cpu"
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.host = torch.device(host)

    def empty_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter that was never updated."""
        zero = {name: room(parameter, self.host).zero_() for name in _MOMENTS}
        return {"step": torch.tensor(0.0)} | zero

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.empty_state(parameter))
        near = [torch.empty_like(parameter).copy_(state[name], non_blocking=True) for name in _MOMENTS]
        beta1, beta2 = group["betas"]
        adamw(
            [parameter], [parameter.grad], [near[0]], [near[1]], [], [state["step"]], foreach=False, fused=False,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for name, value in zip(_MOMENTS, near, strict=True):
            state[name].copy_(value)


_MOMENTS = ("exp_avg", "exp_avg_sq")
