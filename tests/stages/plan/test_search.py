"""The search against a brute-force one, written apart, on made-up models; and the front and the refusal."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from data_contracts.config import PlanConfig, Saving
from data_contracts.errors import DoesNotFitError
from data_contracts.method import resolve
from stages.plan import search as module
from stages.plan.checkpointing import choose_blocks, least_blocks
from stages.plan.estimate import PhaseBytes, Priced
from stages.plan.pieces import Piece, Pieces
from stages.plan.search import Way, front, search
from stages.plan.trace import Shape
from stages.technique.base import Technique
from tests.stages.plan.test_checkpointing import random_pieces

TECHNIQUES = [resolve(Technique, {"method": name}, "t") for name in ("full", "lora")]
SHAPES = [Shape(technique, "float32", 64, 31, False) for technique in TECHNIQUES]
HELD = [
    Shape(technique, precision, 64, 31, False)
    for technique, precision in (
        (TECHNIQUES[0], "float32"),
        (TECHNIQUES[0], "bfloat16"),
        (TECHNIQUES[1], "float32"),
        (TECHNIQUES[1], "bfloat16"),
        (resolve(Technique, {"method": "qlora"}, "t"), "float32"),
    )
]
RESERVE = {1, 3, 4}
"""With `plan.precision: any`: the other precision, and frozen weights in four bits."""


WORTH: dict[Any, float] = {"float32": 1.0, "8bit": 0.95, "4bit": 0.85, "mini": 0.95}
"""Of a token by the form of the moments, as docs/memory.md has it."""


class MadeUp:
    """An estimator over random pieces; savings change bytes and seconds as they do in a real model."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.base = random_pieces(seed, 4, alike=bool(seed % 2))
        self.host: str | None = None
        self.weights = int(draw.integers(100, 400))
        self.share = {"full": 2.0, "lora": float(draw.choice([0.01, 0.1]))}
        self.share["qlora"] = self.share["lora"]
        self._made: dict[Any, Pieces] = {}
        self._walked: dict[Any, Any] = {}

    def _pieces(self, shape: Shape, micro: int) -> Pieces:
        key = (self._passes(shape), micro)
        if key not in self._made:
            factor = micro * (0.6 if shape.precision == "bfloat16" else 1.0)
            gradient = 0.0 if shape.update_in_backward else self.share[type(shape.technique).name()]
            made = Pieces.__new__(Pieces)
            made.layers, made.start, made._found = self.base.layers, self.base.start, {False: {}, True: {}}

            def grown(piece: Piece, head: bool = False) -> Piece:
                scale = factor / (shape.loss_chunks if head else 1)
                seconds = (piece.seconds + 1) * factor * (1.1 if head and shape.loss_chunks > 1 else 1.0)
                own = round(piece.gradients * gradient)
                delta = round((piece.delta - piece.gradients) * factor) + own
                return replace(piece, delta=delta, peak=round(piece.peak * scale), gradients=own,
                               released=round(piece.released * factor), seconds=seconds)  # fmt: skip

            for again, phases in self.base._found.items():
                for name, (before, blocks, after) in phases.items():
                    made._found[again][name] = (grown(before), [grown(one) for one in blocks], grown(after, True))
            self._made[key] = made
        return self._made[key]

    def price(self, shape: Shape, micro: int, accumulation: int, recomputed: tuple[int, ...] = ()) -> Priced:
        passes = 2 if shape.update_in_backward else accumulation
        chosen = tuple(place in recomputed for place in range(4))
        key = (self._passes(shape), micro, chosen, passes)
        if key not in self._walked:
            self._walked[key] = self._pieces(shape, micro).walk(chosen, passes)
        held, seconds = self._walked[key]
        moments = round(self.weights * self.share[type(shape.technique).name()])
        divisor, slower = {"float32": (1, 0.0), "8bit": (4, 0.4), "4bit": (8, 0.1), "mini": (2, 0.3)}[
            shape.optimizer_states
        ]
        moments //= divisor
        phases = {
            name: PhaseBytes(self._weights(shape), moments, item.gradients, item.peak - item.gradients, 0)
            for name, item in held.items()
        }
        return Priced(phases, sum(seconds.values()) + 3.0 + slower)

    @staticmethod
    def _passes(shape: Shape) -> tuple[Any, ...]:
        """What a shape's passes depend on, quickly compared."""
        return id(type(shape.technique)), shape.precision, shape.loss_chunks, shape.update_in_backward

    def _weights(self, shape: Shape) -> int:
        return self.weights // (4 if type(shape.technique).name() == "qlora" else 1)

    def _fixed(self, shape: Shape) -> int:
        phase = self.price(shape, 1, 1).phases["forward"]
        return phase.weights + phase.moments

    def recomputing(self, shape: Shape, micro: int, accumulation: int, allowed: int) -> tuple[int, ...] | None:
        passes = 2 if shape.update_in_backward else accumulation
        found = choose_blocks(self._pieces(shape, micro), passes, allowed - self._fixed(shape))
        return None if found is None else tuple(place for place, again in enumerate(found) if again)

    def least(self, shape: Shape, micro: int, accumulation: int) -> tuple[int, ...]:
        key = (self._passes(shape), micro, accumulation)
        if key not in self._walked:
            self._walked[key] = least_blocks(
                self._pieces(shape, micro), 2 if shape.update_in_backward else accumulation
            )
        return tuple(place for place, again in enumerate(self._walked[key]) if again)


def brute_force(model: MadeUp, plan: PlanConfig, window: int, shapes: list[Shape]) -> list[tuple[int, float, int]]:
    """Return (technique, worth, peak) of every compatible way, all choices of blocks included; nothing is left out."""
    found = []
    for order, each in enumerate(shapes):
        technique = each.technique
        much = model.share[type(technique).name()] * model.weights >= 0.05 * model._weights(each)
        for chunks, states, inside in itertools.product((1, 8), WORTH, (False, True)):
            if not much and (states != "float32" or inside):
                continue
            shape = Shape(technique, each.precision, 64, 31 if chunks == 1 else 32, False, states, chunks, inside)
            for micro in (window,) if inside else [size for size in plan.micro_batches if 2 * size <= window]:
                accumulation = math.ceil(window / micro)
                for choice in itertools.product((False, True), repeat=4):
                    blocks = tuple(place for place, again in enumerate(choice) if again)
                    priced = model.price(shape, micro, accumulation, blocks)
                    speed = 64 * micro * accumulation / priced.seconds
                    found.append((order, speed * WORTH[states], priced.peak_bytes))
    return found


def test_a_brute_force_search_finds_nothing_better_for_200_models_and_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_8bit", lambda: True)
    plan, checked, refused = PlanConfig(micro_batches=(4, 2, 1), headroom=0.0, savings=get_args(Saving)), 0, 0
    for seed in range(40):
        model = MadeUp(seed)
        held = seed % 8 == 0
        shapes, how = (HELD if held else SHAPES), {"window": 8, "workers": 0, "reserve": RESERVE if held else ()}
        every = brute_force(model, plan, 8, shapes)
        peaks = sorted({peak for _, _, peak in every})
        draw = np.random.default_rng(seed)
        for limit in (peaks[0] - 1, peaks[0], *(int(draw.integers(peaks[0], peaks[-1])) for _ in range(3))):
            checked += 1
            fitting = [(order, -worth) for order, worth, peak in every if peak <= limit]
            if not fitting:
                refused += 1
                with pytest.raises(DoesNotFitError) as caught:
                    search(model, shapes, plan, limit=limit, **how)
                assert caught.value.needed_bytes == peaks[0]
                continue
            chosen, ways = search(model, shapes, plan, limit=limit, **how)
            assert chosen.peak_bytes <= limit
            assert (chosen.order, pytest.approx(-chosen.worth, rel=1e-12)) == min(fitting)
            best = {id(way) for way in front(ways)}
            points = [(way.peak_bytes, way.tokens_per_second, id(way) in best) for way in ways]
            kept = {(size, speed) for size, speed, on_front in points if on_front}
            for size, speed, on_front in points:
                if on_front:
                    assert not any(other[0] < size and other[1] > speed for other in points)
                else:
                    assert any(other[0] <= size and other[1] >= speed for other in kept)
    assert checked == 200
    assert refused == 40


def ways_at_the_least_budget(model: MadeUp, workers: int, **settings: Any) -> list[Way]:
    """Return all ways priced for the least budget that one fits."""
    plan = PlanConfig(micro_batches=(4, 2, 1), headroom=0.0, **settings)
    with pytest.raises(DoesNotFitError) as caught:
        search(model, SHAPES[:1], plan, window=8, workers=workers, limit=1)
    return search(model, SHAPES[:1], plan, window=8, workers=workers, limit=caught.value.needed_bytes)[1]


@pytest.mark.parametrize(
    ("saving", "word"),
    [
        ("recompute", "recomputed"),
        ("chunked_loss", "parts"),
        ("update_in_backward", "inside"),
        ("states_8bit", "8 bits"),
        ("states_4bit", "4 bits"),
        ("states_mini", "second moment"),
    ],
)
def test_only_savings_that_are_allowed_are_used(monkeypatch: pytest.MonkeyPatch, saving: str, word: str) -> None:
    monkeypatch.setattr(module, "has_8bit", lambda: True)
    model = MadeUp(2)
    model.share["full"] = 400.0 if saving == "update_in_backward" else 2.0  # gradients that are worth more than rows
    names = {name for way in ways_at_the_least_budget(model, 0, savings=(saving,)) for name in way.savings}
    assert names
    assert all(word in name for name in names)


def test_several_workers_do_not_update_inside_the_backward_pass_and_8_bits_ask_for_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_8bit", lambda: False)
    found = [
        {name for way in ways_at_the_least_budget(MadeUp(2), workers) for name in way.savings} for workers in (0, 2)
    ]
    assert [any("inside" in name for name in names) for names in found] == [True, False]
    assert not any("8 bits" in name for names in found for name in names)
