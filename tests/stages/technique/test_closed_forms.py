"""What training costs by each technique, against closed forms derived by hand.

A forward pass is two operations a weight and token, and in attention four a pair of tokens and channel (scores and
values). Backward, a product has an input gradient where anything below it trains and a weight gradient where its weight
trains, each as dear as the product; attention has five products for the two of its forward pass, which are half as dear
as 4 T² H each: 2.5 times. Nothing below the first layer's first products trains where embeddings and norms are frozen.
Shapes: B rows of T tokens, A answers; H channels, K of them keys and values, F inner, L layers, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from data_contracts.method import names
from stages.technique.base import Technique
from tests.stages.technique.setting import pinned, started, technique
from tests.stages.train.small import VOCABULARY

B, T, A = 3, 17, 20
H, K, F, L, V = 192, 96, 24, 3, VOCABULARY
SHAPES = ((H, H), (H, K), (H, K), (H, H), (H, F), (H, F), (F, H))
"""(inputs, outputs) of a layer's products: query, key, value, output, gate, up, down."""
W = sum(inputs * outputs for inputs, outputs in SHAPES)
FIRST = sum(inputs * outputs for inputs, outputs in SHAPES[:3])
LAYER, HEAD, ATTENTION = 2 * W * T * B, 2 * H * V * A, 4 * T * T * H * B
FORWARD = L * (LAYER + ATTENTION) + HEAD
THROUGH = LAYER + ATTENTION * 5 // 2
"""Backward through a layer of which nothing trains."""
FULL = FORWARD + L * (THROUGH + LAYER) + 2 * HEAD
FROM_FIRST_LAYER = L * THROUGH - 2 * FIRST * T * B
"""Backward to the first layer's products, not through them."""


def block(number: int) -> int:
    """One layer trains, its norms too; what is above it is passed through."""
    return FORWARD + HEAD + (L - number) * THROUGH + LAYER


def adapters(rank: int, inputs_of: Callable[[int], int] = lambda inputs: inputs) -> int:
    """Two thin products beside each, both trained; `inputs_of` says how many numbers the first one reads."""
    down, up = (rank * sum(sizes) for sizes in zip(*((inputs_of(i), o) for i, o in SHAPES), strict=True))
    first = rank * sum(inputs_of(i) for i, _ in SHAPES[:3])
    beside = 2 * T * B * (3 * L * (down + up) - first)
    return FORWARD + HEAD + FROM_FIRST_LAYER + beside


def thin(rank: int, times: int, *, squares: bool = False) -> int:
    """Making a direction U Vᵀ (U Z Vᵀ) of every matrix, `times` with the embedding's counted where it is used."""
    matrices = [(o, i) for i, o in SHAPES] * L + [(V, H)] * times
    more = sum(2 * m * rank * rank + orthonormal(m, rank) + orthonormal(n, rank) for m, n in matrices) if squares else 0
    return sum(2 * m * n * rank for m, n in matrices) + more


def orthonormal(size: int, rank: int) -> int:
    """Householder QR, 2 m r² − 2 r³/3, and as much again for Q's columns; both rounded down."""
    return 2 * ((6 * size * rank**2 - 2 * rank**3) // 3)


def vectors() -> int:
    """Singular values and both sides' vectors of every matrix, 6 m n² + 20 n³ (R-SVD; n is the smaller)."""
    return L * sum(6 * max(shape) * min(shape) ** 2 + 20 * min(shape) ** 3 for shape in SHAPES)


def zeroth(rank: int, *, squares: bool = False, batches: int = 2) -> int:
    """Two forward passes; directions for each pass of a micro-batch and once for the update."""
    return 2 * FORWARD + batches * 2 * thin(rank, 2, squares=squares) + thin(rank, 1, squares=squares)


def carried(rank: int) -> int:
    """Momenta expressed in a new right factor: (r, n) by (n, r), then (m, r) by (r, r)."""
    return sum(2 * (m + n) * rank * rank for m, n in [*SHAPES] * L + [(V, H)])


CASES: list[tuple[Mapping[str, Any], int, int]] = [  # settings, window, operations
    ({"method": "full"}, 0, FULL),
    ({"method": "lora", "r": 2}, 0, adapters(2)),
    ({"method": "qlora", "r": 2}, 0, adapters(2)),
    ({"method": "qa_lora", "r": 2, "group_size": 8}, 0, adapters(2, lambda inputs: inputs // 8)),
    ({"method": "peqa"}, 0, FORWARD + HEAD + FROM_FIRST_LAYER + L * LAYER),
    ({"method": "dqt", "bits": 8}, 0, FULL),
    ({"method": "baoc", "state_share": 0.7, "probe_steps": 2}, 0, FULL),
    ({"method": "lopt"}, 0, FULL + 6 * 2 * H * (H // 4) * T * B),  # one head: down to a quarter and back
    *(({"method": "badam", "block_steps": 1, "order": "ascending"}, layer, block(layer)) for layer in range(L)),
    ({"method": "hift"}, 0, FORWARD + 2 * HEAD + L * THROUGH),  # the embedding is the head's weight too
    ({"method": "hift"}, 2, block(1)),
    ({"method": "hift"}, L, block(L - 1)),  # and the last norm, which has no product
    ({"method": "lisa", "layers": 2, "block_steps": 2}, 0, FORWARD + 2 * HEAD + L * THROUGH + 2 * LAYER),
    ({"method": "galore", "rank": 4}, 0, FULL + 2 * 2 * 4 * L * W + vectors()),  # into the space and back
    ({"method": "galore", "rank": 4}, 1, FULL + 2 * 2 * 4 * L * W),
    ({"method": "galore", "rank": 4, "gap": 3}, 3, FULL + 2 * 2 * 4 * L * W + vectors()),
    ({"method": "apollo", "rank": 4}, 0, FULL + 2 * 4 * L * W),
    ({"method": "mezo"}, 0, 2 * FORWARD),
    ({"method": "lozo", "rank": 2}, 0, zeroth(2)),
    ({"method": "lozo", "rank": 2, "interval": 3, "momentum": 0.9}, 3, zeroth(2) + carried(2)),
    ({"method": "subzero", "rank": 3}, 0, zeroth(3, squares=True)),
    ({"method": "addax"}, 0, FULL + 2 * FORWARD),
    ({"method": "addax", "long_tokens": T - 1}, 0, 2 * FORWARD),
    ({"method": "addax", "long_tokens": T}, 0, FULL),
    ({"method": "hybrid", "block_steps": 1, "order": "ascending"}, 1, block(1) + 2 * FORWARD),
    ({"method": "hybrid", "block_steps": 1, "order": "ascending", "long_tokens": T}, 0, block(0)),
]


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "three", L, hidden=H)


@pytest.mark.parametrize(("settings", "window", "operations"), CASES, ids=lambda item: str(item)[:60])
def test_a_window_of_two_micro_batches_costs_what_is_derived_by_hand(pin, settings, window, operations):
    if settings["method"] == "qlora" and find_spec("bitsandbytes") is None:
        pytest.skip("qlora needs bitsandbytes")
    price = started(technique(**settings), pin).price(window)
    rows = price.train(1, T, A // 2) + price.train(B - 1, T, A - A // 2)
    assert rows + price.beside(2, 1) == operations


def test_every_technique_has_a_closed_form():
    assert {settings["method"] for settings, _, _ in CASES} == set(names(Technique))
