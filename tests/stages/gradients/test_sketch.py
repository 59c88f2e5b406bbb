"""The sparse sketch against its matrix, written out entry by entry, and against the closed form of its variance."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch

from stages.gradients.sketch import SparseSketch


def matrix_of(sketch: SparseSketch, sizes: dict[str, int]) -> scipy.sparse.csr_array:
    """Return S (K x all coordinates) from the definition: coordinate p of run c is at (p + shift_c) mod m of a part."""
    rows, columns, values, offset = [], [], [], 0
    m = sketch.dimensions // sketch.parts
    for name, size in sizes.items():
        for part in range(sketch.parts):
            shift_C, sign_P = sketch.draw(name, size, part)
            for coordinate in range(size):
                run, place = divmod(coordinate, m)
                rows.append(part * m + (place + int(shift_C[run])) % m)
                columns.append(offset + coordinate)
                values.append(float(sign_P[coordinate]))
        offset += size
    return scipy.sparse.csr_array((values, (rows, columns)), shape=(sketch.dimensions, offset))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_sketch_is_its_sparse_matrix(parts: int) -> None:
    sizes = {"a": 5, "b": 64, "c": 301}  # shorter than a run, whole runs, and a rest
    sketch = SparseSketch(64, parts=parts, seed=3)
    vectors = {name: torch.randn(4, size, dtype=torch.float64) for name, size in sizes.items()}
    found = torch.zeros(4, 64, dtype=torch.float64)
    for name, values in vectors.items():
        sketch.add(found, name, values)
    matrix = matrix_of(sketch, sizes)
    expected = (matrix @ torch.cat(list(vectors.values()), dim=1).T.numpy()).T
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    one = {name: values[2].reshape(-1, 1) for name, values in vectors.items()}
    np.testing.assert_allclose(sketch.of(one), expected[2], rtol=1e-6, atol=1e-6)
    assert (np.diff(matrix.tocsc().indptr) == parts).all()
    np.testing.assert_allclose((matrix.multiply(matrix)).sum(axis=0), 1, rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_products_are_unbiased_with_the_stated_variance(parts: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal(400) * (1 + 9 * (random.random(400) < 0.05))  # some heavy coordinates
    y = 0.3 * x + random.standard_normal(400)
    pair = torch.from_numpy(np.stack([x, y]))
    k = 32
    products = []
    for seed in range(1000):
        found = torch.zeros(2, k, dtype=torch.float64)
        SparseSketch(k, parts=parts, seed=seed).add(found, "x", pair)
        products.append(float(found[0] @ found[1]))
    run = np.arange(400) // (k // parts)
    apart = run[:, None] != run[None, :]
    variance = (apart * (np.outer(x**2, y**2) + np.outer(x * y, x * y))).sum() / k
    assert abs(np.mean(products) - x @ y) < 4 * (variance / len(products)) ** 0.5
    assert np.var(products, ddof=1) == pytest.approx(variance, rel=0.2)
    dense = ((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()) / k
    assert variance <= dense


def test_names_parts_and_seeds_draw_apart_and_equal_ones_alike() -> None:
    draws = [
        SparseSketch(16, parts=2, seed=seed).draw(name, 200, part)[1].tolist()
        for seed in (0, 1)
        for name in ("a", "b")
        for part in (0, 1)
    ]
    assert len({tuple(draw) for draw in draws}) == 8
    assert SparseSketch(16, parts=2).draw("a", 200, 0)[1].tolist() == draws[0]


@pytest.mark.parametrize(("dimensions", "parts"), [(10, 4), (2, 4), (8, 0)])
def test_a_sketch_without_equal_parts_is_refused(dimensions: int, parts: int) -> None:
    with pytest.raises(ValueError, match="equal parts"):
        SparseSketch(dimensions, parts=parts)
