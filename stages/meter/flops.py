"""Floating-point operations, counted from the operators that ran.

`FlopCounter` is torch's FlopCounterMode with the formulas that it lacks (`formulas.py`); a matmul-like operator without
a formula is an error, never zero. `FlopModel` traces a model at a few small shapes and fits the exact polynomial, so
that any later batch is priced without being counted. Element-wise work is not counted (a multiply-add is two
operations).
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from data_contracts.errors import ModelError
from stages.meter.formulas import COMPOSED, FORMULAS, MATMUL_LIKE

_LENGTHS = (8, 16, 24)
_CHECK = (2, 40, 5)  # rows, tokens, kept positions


class _Whole:
    """Stands for torch's module tracker, whose hooks on every module take most of a trace's time: one total only."""

    parents = ("Global",)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Calls(TorchFunctionMode):
    """Counts the products that reach the dispatcher as element-wise operators."""

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COMPOSED:
            self.counter._count_flops(COMPOSED[func], out, args, kwargs or {})
        return out


class FlopCounter(FlopCounterMode):
    """Count every matmul-like operator inside the context; `total` is the sum.

    Raises `ModelError` at the first matmul-like operator that has no formula.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker: Any = _Whole()
        self._calls = _Calls(self)

    def __enter__(self) -> Self:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        self._calls.__exit__(*raised)
        return super().__exit__(*raised)

    @property
    def total(self) -> int:
        """Operations counted so far."""
        return int(self.get_total_flops())

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet not in self.flop_registry:
            name = getattr(func_packet, "__name__", str(func_packet))
            if MATMUL_LIKE.search(name):
                raise ModelError(
                    "every matmul-like operator that runs has a FLOP formula",
                    f"{func_packet} has none",
                    "add its formula to stages/meter/formulas.py",
                )
        return super()._count_flops(func_packet, out, args, kwargs)


Polynomial = tuple[Fraction, ...]


def _evaluate(polynomial: Polynomial, tokens: int) -> Fraction:
    return sum((c * tokens**power for power, c in enumerate(polynomial)), Fraction(0))


@dataclass(frozen=True)
class FlopModel:
    """Operations of a forward pass and of a training pass (forward + backward) of one model in one technique.

    `body` and `body_train` hold the coefficients 1, T, T² of one row of padded length T; `head` and `head_train` the
    operations of one position that goes through the output head. `body_train` is None where only forward was traced.
    Training may do more whatever the rows: `batch` once a micro-batch, `update` once a window; see `beside`. Rows of
    more than `forward_above` padded tokens are trained by two forward passes alone.
    """

    body: Polynomial
    head: Fraction
    body_train: Polynomial | None = None
    head_train: Fraction = Fraction(0)
    batch: Fraction = Fraction(0)
    update: Fraction = Fraction(0)
    forward_above: int | None = None

    @classmethod
    def trace(cls, model: Any, *, train: bool) -> FlopModel:
        """Trace `model` as it stands: its adapters, what requires a gradient, and activation checkpointing.

        Five passes over at most 80 tokens, once a process for models that are alike.

        Args:
            model: a causal language model of transformers or PEFT, on any device, real or fake.
            train: whether to trace the backward pass too.

        Raises `ModelError` for an operator without a formula, or a cost that is not a polynomial in the row's length.
        """
        key = _signature(model, train)
        if key not in _traced:
            _traced[key] = _trace(model, train)
        return _traced[key]

    def forward(self, rows: int, tokens: int, answers: int | None = None) -> int:
        """Return the operations of a forward pass of `rows` rows of padded length `tokens`.

        `answers` is how many positions go through the head (the supervised ones); None is all of them.
        """
        return _whole(rows * _evaluate(self.body, tokens) + _positions(rows, tokens, answers) * self.head)

    def train(self, rows: int, tokens: int, answers: int | None = None, *, chunked: bool = False) -> int:
        """Return the operations of forward + backward; `chunked` adds the head's second forward pass.

        Raises `ModelError` where only the forward pass was traced.
        """
        if self.forward_above is not None and tokens > self.forward_above:
            return 2 * self.forward(rows, tokens, answers)
        if self.body_train is None:
            raise ModelError("a FLOP model traced with train=True", "it knows forward only", "trace it for training")
        positions = _positions(rows, tokens, answers)
        head = self.head_train + (self.head if chunked else 0)
        return _whole(rows * _evaluate(self.body_train, tokens) + positions * head)

    def beside(self, batches: int, windows: int) -> int:
        """Return the operations of training on so many micro-batches in so many windows that `train` leaves out."""
        return _whole(batches * self.batch + windows * self.update)

    def deepened(self, deeper: FlopModel, steps: Fraction | int) -> FlopModel:
        """Return this model with `steps` times the difference to `deeper` added: exact where layers are alike."""
        return self.plus(self, deeper, steps)

    def plus(self, one: FlopModel, other: FlopModel, times: Fraction | int) -> FlopModel:
        """Return this model with `times` the difference of two others' bodies, `other` less `one`, added."""

        def line(start: Polynomial, low: Polynomial, high: Polynomial) -> Polynomial:
            return tuple(value + times * (b - a) for value, a, b in zip(start, low, high, strict=True))

        train = None
        if self.body_train is not None and one.body_train is not None and other.body_train is not None:
            train = line(self.body_train, one.body_train, other.body_train)
        mine, low, high = ((model.batch, model.update) for model in (self, one, other))
        batch, update = line(mine, low, high)
        body = line(self.body, one.body, other.body)
        return FlopModel(body, self.head, train, self.head_train, batch, update, self.forward_above)

    @staticmethod
    def mean(models: Sequence[FlopModel]) -> FlopModel:
        """Return the mean of models that all were, or all were not, traced for training; not rounded."""
        count = len(models)

        def middle(parts: Sequence[Polynomial]) -> Polynomial:
            return tuple(sum(column, Fraction(0)) / count for column in zip(*parts, strict=True))

        trained = [model.body_train for model in models if model.body_train is not None]
        batch, update = middle([(model.batch, model.update) for model in models])
        return FlopModel(
            middle([model.body for model in models]),
            sum((model.head for model in models), Fraction(0)) / count,
            middle(trained) if trained else None,
            sum((model.head_train for model in models), Fraction(0)) / count,
            batch,
            update,
            models[0].forward_above,
        )

    def rounded(self) -> FlopModel:
        """Return this model with its coefficients rounded up, so that any batch has a whole number of operations."""

        def up(part: Polynomial) -> Polynomial:
            return tuple(Fraction(math.ceil(c)) for c in part)

        train = None if self.body_train is None else up(self.body_train)
        head, head_train, batch, update = up((self.head, self.head_train, self.batch, self.update))
        return FlopModel(up(self.body), head, train, head_train, batch, update, self.forward_above)

    def probing(self, count: int) -> FlopModel:
        """Return this model with `count` forward passes more in the training of every batch."""
        assert self.body_train is not None
        train = tuple(a + count * b for a, b in zip(self.body_train, self.body, strict=True))
        head = self.head_train + count * self.head
        return FlopModel(self.body, self.head, train, head, self.batch, self.update, self.forward_above)


def _positions(rows: int, tokens: int, answers: int | None) -> int:
    return rows * tokens if answers is None else answers


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise ModelError("a whole number of operations", f"the fit gives {value}", "report this model")
    return int(value)


_traced: dict[str, FlopModel] = {}


def _signature(model: Any, train: bool) -> str:
    """Return a digest of all that decides the operations: structure, shapes, what is trained, recomputation."""
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    weights = [(name, tuple(w.shape), w.requires_grad) for name, w in model.named_parameters()]
    device = next(iter(model.parameters())).device.type
    text = repr((modules, weights, train and recomputed(model), model.config.to_json_string(), device, train))
    return hashlib.sha256(text.encode()).hexdigest()


def _trace(model: Any, train: bool) -> FlopModel:
    rows, tokens, kept = _CHECK
    counts = [_count(model, 1, length, 1, train) for length in _LENGTHS]
    wider, check = _count(model, 1, _LENGTHS[0], 3, train), _count(model, rows, tokens, kept, train)
    fits = []
    for part in range(2 if train else 1):
        head = Fraction(wider[part] - counts[0][part], 2)
        body = _through(_LENGTHS, [count[part] - head for count in counts])
        said = rows * _evaluate(body, tokens) + rows * kept * head
        if check[part] != said:
            raise ModelError(
                "operations that are linear in rows and quadratic in the row's length",
                f"at {rows} rows of {tokens} tokens {check[part]} were counted and {said} expected",
                "use a model with plain attention over the whole row",
            )
        fits.append((body, head))
    return FlopModel(*fits[0], *fits[1]) if train else FlopModel(*fits[0])


def _through(lengths: Sequence[int], values: Sequence[Fraction]) -> Polynomial:
    """Return the coefficients of the parabola through three points (Lagrange form, exact)."""
    total = [Fraction(0)] * 3
    for i, (x, y) in enumerate(zip(lengths, values, strict=True)):
        u, v = (other for j, other in enumerate(lengths) if j != i)
        scale = Fraction(y) / ((x - u) * (x - v))
        for power, c in enumerate((u * v, -(u + v), 1)):
            total[power] += scale * c
    return tuple(total)


def _count(model: Any, rows: int, tokens: int, kept: int, train: bool) -> tuple[int, int]:
    """Return the operations of one forward pass, and of forward + backward (the same where not `train`)."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    device = next(iter(model.parameters())).device
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        raise ModelError("a model that can keep chosen logits", f"{type(inner).__name__} cannot", "use another model")
    mixed = any(weight.dtype == torch.bfloat16 for weight in model.parameters())
    cast = torch.autocast(device.type, torch.bfloat16, enabled=mixed)
    with _as_in_training(model, train), torch.set_grad_enabled(train), cast, FlopCounter() as counter:
        ids_BT = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        logits = model(input_ids=ids_BT, use_cache=False, logits_to_keep=kept).logits
        forward = counter.total
        if train:
            torch.autograd.grad(logits.sum(), trainable, allow_unused=True)
    return forward, counter.total


def recomputed(model: Any) -> list[str]:
    """Return the blocks, by name, that compute their activations again in the backward pass."""
    return [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]


@contextmanager
def _as_in_training(model: Any, train: bool) -> Iterator[None]:
    """Put the model in training mode and back, the generators too: dropout and recomputation run in that mode alone."""
    was = model.training
    fake = isinstance(next(iter(model.parameters())), FakeTensor)
    model.train(train)
    try:
        with torch.random.fork_rng(), plain_positions() if fake else nullcontext():
            yield
    finally:
        model.train(was)


@contextmanager
def plain_positions() -> Iterator[None]:
    """Tell transformers that no row of a fake batch is packed, which it otherwise reads from the position ids.

    A fake tensor has no values to read, so it would build a mask that the real run does without.
    """
    from transformers import masking_utils

    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked
