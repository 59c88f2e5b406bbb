"""Training by forward passes alone: the loss at θ + εz and θ − εz gives the slope along z, and θ moves along z.

g = (L(θ + εz) − L(θ − εz)) / 2ε and θ ← θ − lr·g·z. A weight is exchanged for its perturbed copy only while its layer
runs, so weights come back byte for byte and the memory is that of inference and one layer's weight. Directions are
drawn again from (seed, window, name) whenever they are needed and never kept. How z is drawn is the technique's. z has
unit variance, so the mean of g² over z is |∇L|² and g is clipped as a gradient's norm is.
Source: Malladi et al. 2023 (arXiv 2305.17333), algorithm 1.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from data_contracts.errors import ModelError
from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.model.loss import chunk_of, document_losses
from stages.technique.attempt import ShortOfMemoryError, noted
from stages.technique.bounds import Bounds
from stages.technique.optimizer import How, Optimizer
from stages.technique.step import StepResult, trainable

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig


def generator(device: torch.device, *names: object) -> torch.Generator:
    """Return a generator whose draws `names` alone decide."""
    digest = hashlib.blake2b("\n".join(map(str, names)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def drawn(shape: Sequence[int], like: Tensor, *names: object) -> Tensor:
    """Return a standard normal tensor that `names` alone decide, on the device and in the dtype of `like`."""
    return torch.randn(shape, generator=generator(like.device, *names), device=like.device, dtype=like.dtype)


class Along(torch.optim.Optimizer):
    """Moves each parameter by the closure it is given, after decoupled weight decay of matrices."""

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[nn.Parameter], None]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["weight_decay"] and parameter.ndim >= 2:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                closure(parameter)


class ZerothOrder(Optimizer):
    """Descent along drawn directions.

    Args:
        model: what trains has `requires_grad`.
        train: weight decay is taken from it; Adam's settings have no meaning here.
        epsilon: how far the weights are moved to read the slope.
        seed: of the directions.
        named: what moves, by its names in the model; None is what trains.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, epsilon: float, seed: int,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.named, self.epsilon, self.seed = trainable(model) if named is None else named, epsilon, seed
        self._names = {parameter: name for name, parameter in self.named.items()}
        self._along = Along(list(self.named.values()), train.weight_decay)

    @abstractmethod
    def moved(self, name: str, weight: Tensor, by: float) -> Tensor:
        """Return a copy of `weight` moved by `by` along this window's direction."""

    @abstractmethod
    def move(self, name: str, weight: Tensor, by: float) -> None:
        """Move `weight` by `by` along the same direction, in place."""

    def renew(self) -> None:
        """Called once a window, before its update."""

    def thin_flops(self, weight: Tensor) -> int:
        """Return the matrix operations of moving one weight along a direction once."""
        return 0

    def renewal_flops(self, window: int) -> int:
        """Return the matrix operations before a window, beside its own direction."""
        return 0

    def slope(self, window: Sequence[TokenBatch], how: How) -> tuple[float, StepResult]:
        """Return the slope g of a window's mean loss along its direction, and the result that a step would have.

        The losses are the means of both sides; `gradient_norm` is |g|. Raises `ShortOfMemoryError`.
        """
        precision, all_reduce = how.get("precision", "float32"), how.get("all_reduce")
        device = next(iter(self.named.values())).device
        totals = torch.zeros(4, dtype=torch.float64, device=device)  # loss on either side, answer tokens, short
        losses: list[Tensor] = []
        counts: list[Tensor] = []
        with noted() as ran_out, torch.no_grad(), evaluating(self.model):  # dropout would differ between the sides
            for batch in window:
                sides = []
                for sign in (1, -1):
                    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
                    with self.perturbed(sign * self.epsilon), autocast:
                        chunk = chunk_of(batch, how.get("loss_chunks", 1))
                        loss_D, tokens_D = document_losses(self.model, batch, chunk_tokens=chunk)
                    sides.append(loss_D.double())
                weights_D = batch.weights_D.double()
                parts = [(side * weights_D).sum() for side in sides] + [(tokens_D * weights_D).sum()]
                totals[:3] += torch.stack(parts)
                losses.append((sides[0] + sides[1]) / 2)
                counts.append(tokens_D)
        totals[3] += len(ran_out)
        if all_reduce is not None:
            all_reduce([totals])
        if ran_out or (all_reduce is not None and totals[3] > 0):
            raise ShortOfMemoryError(str(ran_out[0]) if ran_out else "memory ran out on another rank")
        above, below, tokens, _ = totals.tolist()
        slope = (above - below) / (2 * self.epsilon * tokens) if tokens > 0 else math.nan
        empty = torch.zeros(0, device=device)
        return slope, StepResult(
            (above + below) / 2,
            tokens,
            torch.cat(losses) if losses else empty,
            torch.cat(counts) if counts else empty.long(),
            abs(slope),
            None,
            tokens > 0 and (how.get("bounds") or Bounds()).allow((above + below) / (2 * tokens), abs(slope)),
        )

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Read the slope along this window's direction and move against it; see `Optimizer.step`."""
        slope, result = self.slope(window, how)
        self.renew()
        if result.applied:
            bounds, taken = how.get("bounds"), slope * min(1.0, how["clip"] / (abs(slope) + 1e-6))
            with bounds.measured(list(self.named.values())) if bounds else nullcontext():
                self.descend(taken, rate)
            if bounds:
                bounds.promise(rate * slope * taken)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def descend(self, slope: float, rate: float) -> None:
        """Move all weights by −rate · slope along the direction."""
        for options in self._along.param_groups:
            options["lr"] = rate
        self._along.step(lambda parameter: self.move(self._names[parameter], parameter, -rate * slope))

    @contextmanager
    def perturbed(self, by: float) -> Iterator[None]:
        """Let each layer compute with its weights moved by `by` along the direction, inside the context.

        Raises `ModelError` where a weight was not used by its own layer: it would move without having been read.
        """
        used: set[str] = set()
        with ExitStack() as stack:
            for module in self.model.modules():
                own = {key: item for key, item in module._parameters.items() if item in self._names}
                if own:
                    stack.enter_context(_Exchange(module, own, self, by, used))
            yield
        if missed := self.named.keys() - used:
            raise ModelError(
                "every trained weight is used by its own layer in every pass",
                f"{len(missed)} are not, such as {min(missed)}",
                "train this model by backward passes",
            )

    def plain(self) -> dict[str, Any]:
        """Add the seed."""
        return super().plain() | {"seed": self.seed}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the same directions."""
        super().restore(plain, tensors)
        self.seed = int(plain["seed"])

    def stand(self) -> dict[str, list[Tensor]]:
        """Return nothing: a seed and a number are all that is kept."""
        return {}

    def price(self, window: int) -> FlopModel:
        """Return two forward passes, in which every module moves its own weights, and the update."""
        if self._priced is None:
            used = [item for module in self.model.modules() for item in module._parameters.values()]
            batch = 2 * sum(self.thin_flops(item) for item in used if item in self._names)
            update = sum(self.thin_flops(item) for item in self.named.values())
            one = FlopModel.trace(self.model, train=False)
            self._priced = replace(one, batch=Fraction(batch), update=Fraction(update), forward_above=0)
        return replace(self._priced, update=self._priced.update + self.renewal_flops(window))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode and back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Exchange:
    """Hooks of one module: perturbed weights before its forward pass, its own again after it, whatever happens."""

    def __init__(
        self, module: nn.Module, own: Mapping[str, nn.Parameter], optimizer: ZerothOrder, by: float, used: set[str]
    ) -> None:
        self._module, self._own, self._optimizer, self._by, self._used = module, own, optimizer, by, used
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            self._module.register_forward_pre_hook(self._exchange),
            self._module.register_forward_hook(self._restore, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        self._restore()
        for handle in self._handles:
            handle.remove()

    def _exchange(self, *_: Any) -> None:
        for key, parameter in self._own.items():
            name = self._optimizer._names[parameter]
            self._module._parameters[key] = self._optimizer.moved(name, parameter.detach(), self._by)  # type: ignore[assignment]
            self._used.add(name)

    def _restore(self, *_: Any) -> None:
        self._module._parameters.update(self._own)
