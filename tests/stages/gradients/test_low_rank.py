"""Directions as thin factors against explicit gradients and numpy's decomposition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.gradients import low_rank
from stages.gradients.inner_product import InnerProducts
from stages.gradients.low_rank import Factors, Spectrum, factored, wide_layers
from stages.model.batch import collate
from stages.model.packing import collate_packed, pack
from tests.stages.gradients.small_models import rows_of, tiny_gpt2, tiny_llama
from tests.stages.gradients.test_inner_product import directions_for, error, oracle


def cut(model: nn.Module, directions: dict[str, Tensor], ranks: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Factors]]:  # fmt: skip
    """Return (the other directions, all of them with the wide ones cut by numpy, the wide ones' factors)."""
    wide = wide_layers(model, directions, 8)
    rest = {name: value for name, value in directions.items() if name not in wide}
    expected, factors = dict(directions), {}
    for name, turned in wide.items():
        several = [one.mT if turned else one for one in directions[name]]
        factors[name] = factored([Spectrum.of(one, 8, 0) for one in several], ranks)
        cuts = []
        for one, rank in zip(several, ranks, strict=True):
            u, s, vt = np.linalg.svd(one.numpy(), full_matrices=False)
            made = torch.from_numpy((u[:, :rank] * s[:rank]) @ vt[:rank])
            cuts.append(made.mT if turned else made)
        expected[name] = torch.stack(cuts)
    return rest, expected, factors


@pytest.mark.parametrize("ranks", [[3], [1, 5, 2]])
@pytest.mark.parametrize(("make", "layers"), [(tiny_llama, 14), (tiny_gpt2, 8)])
def test_products_with_factors_are_those_with_the_cut_directions(
    make: Callable[[], nn.Module], layers: int, ranks: list[int]
) -> None:
    model, rows = make(), rows_of(9)
    rest, expected, factors = cut(model, directions_for(model, len(ranks)), ranks)
    assert len(factors) == layers  # the tied head and the embedding are none of them
    with InnerProducts(model, rest, factors=factors) as products:
        found = products.of(collate(rows))
    assert error(found.product_DJ, oracle(model, rows, expected)) < 1e-12


def test_packed_rows_are_contracted_through_factors_too() -> None:
    model, rows = tiny_llama(), rows_of(11, seed=3)
    rest, expected, factors = cut(model, directions_for(model, 2), [2, 4])
    batch = collate_packed([[rows[i] for i in members] for members in pack(rows, 40)], pad_to=44)
    with InnerProducts(model, rest, factors=factors) as products:
        found = products.of(batch)
    order = [row.example_id for row in rows]
    expected_DJ = oracle(model, rows, expected)[[order.index(one) for one in batch.example_ids]]
    assert error(found.product_DJ, expected_DJ) < 1e-12


def test_what_factors_save_is_counted() -> None:
    model, rows = tiny_llama(), rows_of(4)
    directions = directions_for(model, 1)
    rest, _, factors = cut(model, directions, [2])
    with InnerProducts(model, rest, factors=factors) as products:
        products.of(collate(rows))
    positions = 4 * max(len(row.input_ids) for row in rows)
    sides = [directions[name].shape[1:] for name in factors]
    assert products.extra_flops == sum(2 * positions * (2 * (o + i) - o * i) for o, i in sides)


@pytest.mark.parametrize(("shape", "side"), [((40, 24), 1024), ((24, 40), 1024), ((90, 60), 32)])
def test_leading_terms_and_what_lies_beyond_are_numpys(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], side: int
) -> None:
    """The last case by random projection, on a spectrum that falls as those of gradients do."""
    monkeypatch.setattr(low_rank, "DENSE_SIDE", side)
    random = np.random.default_rng(0)
    short = min(shape)
    u, _ = np.linalg.qr(random.normal(size=(shape[0], short)))
    v, _ = np.linalg.qr(random.normal(size=(shape[1], short)))
    s = 0.7 ** np.arange(short)
    matrix = (u * s) @ v.T
    found = Spectrum.of(torch.from_numpy(matrix), 12, seed=3)
    state = torch.random.get_rng_state()
    again = Spectrum.of(torch.from_numpy(matrix), 12, seed=3)
    assert torch.equal(found.left_oK, again.left_oK)
    assert torch.equal(state, torch.random.get_rng_state())
    for rank in (1, 5, 12):
        best = (u[:, :rank] * s[:rank]) @ v[:, :rank].T
        np.testing.assert_allclose((found.left_oK[:, :rank] @ found.right_Ki[:rank]).numpy(), best, atol=2e-5)
        beyond = np.linalg.norm(s[rank:]) / np.linalg.norm(s)
        assert found.beyond_K[rank - 1] == pytest.approx(beyond, abs=1e-4)
    gradient = random.normal(size=shape)
    expected = [float((gradient * ((u[:, :k] * s[:k]) @ v[:, :k].T)).sum()) for k in range(1, 13)]
    np.testing.assert_allclose(found.terms(torch.from_numpy(gradient)), expected, atol=1e-3 * np.abs(expected).max())
    assert found.rank(0.5) == next(k for k in range(1, 12) if np.linalg.norm(s[k:]) <= 0.5 * np.linalg.norm(s))
    assert found.rank(1e-9) is None
