"""Weights spread over ranks (FSDP2): a rank holds 1/n of every parameter, of its gradient and of its moments.

A block is gathered whole while it runs, forward and again backward, and given up after; what lies outside the blocks is
gathered around them. Gradients are summed over ranks as a backward pass produces them, so every rank makes the same
number of passes. A spread tensor is torch's DTensor, cut along its first dimension: rank i has the i-th of n chunks,
the last of which may be shorter or empty.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

WITHIN = "within_shards"


def ranks(kind: str) -> DeviceMesh:
    """Return all ranks of the process group, on devices of `kind`."""
    return init_device_mesh(kind, (distributed.get_world_size(),))


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Spread the parameters of `model` over ranks, in place and on their devices."""
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, as of gradients that every rank holds whole
            module.set_force_sum_reduction_for_comms(True)
    setattr(model, WITHIN, types.MethodType(_within, model))
    register_fsdp_forward_method(model, WITHIN)


def _within(_: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def sharded(model: Any) -> bool:
    """Return whether the parameters of `model` are spread."""
    return isinstance(model, FSDPModule)


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a spread tensor, in place; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a spread tensor whole; every rank calls it. Another tensor comes as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Return `value`, whole or this rank's part, on the device and in the form of `like`, which it has the shape of."""
    moved = value.to(like.device)
    if not isinstance(like, DTensor):
        return moved
    if moved.shape == like.shape:
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(moved, like.device_mesh, like.placements, shape=shape, stride=stride)
