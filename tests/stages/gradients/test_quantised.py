"""Quantised rows: the rotation, the worst error of each width, unbiased signs, and that nothing is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gradients.quantised import Quantiser, _hadamard


def test_the_transform_is_the_hadamard_matrix() -> None:
    values = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    np.testing.assert_allclose(_hadamard(values), values @ scipy.linalg.hadamard(32) / 32**0.5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 300))
def test_the_rotation_is_orthogonal_for_any_number_of_dimensions(size: int) -> None:
    found = Quantiser(size, 8)
    matrix = found._turn(np.eye(size, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=2e-5)
    np.testing.assert_allclose(found._turn_back(matrix), np.eye(size), atol=2e-5)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.sampled_from([4, 8, 16, 32]), st.floats(-30, 30), st.integers(0, 2**32 - 1))
def test_no_number_is_further_off_than_half_a_step(size: int, bits: int, power: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = (random.standard_t(2, (4, size)) * 10.0**power).astype(np.float32)
    rows[1] = 0
    found = Quantiser(size, bits)  # type: ignore[arg-type]
    code, scale = found.encode(rows)
    assert code.shape == (4, found.code_bytes)
    assert code.dtype == np.uint8
    back = found.decode(code, scale)
    largest = np.abs(found._turn(rows)).max(axis=1) if bits < 32 else np.zeros(4)
    step = {4: 1 / 7, 8: 1 / 127, 16: 2**-10, 32: 0}[bits]
    off = np.abs(found._turn(back) - found._turn(rows)).max(axis=1)
    assert (off <= largest * (step / 2 + 1e-5) + 1e-44).all()
    assert not back[1].any()


def test_one_bit_is_the_sign_and_its_product_with_a_whole_vector_is_unbiased() -> None:
    random = np.random.default_rng(1)
    size, count = 512, 3000
    x = np.zeros(size)
    x[:5] = [8, -3, 2, 1, 1]  # heavy: without a rotation its signs would say nothing
    y = 0.5 * x + random.standard_normal(size) * 0.3
    turns = [np.linalg.qr(random.standard_normal((size, 2)))[0].T for _ in range(count)]  # x and y, turned at random
    gram = np.linalg.cholesky(np.array([[x @ x, x @ y], [x @ y, y @ y]]))
    pairs = np.stack([gram @ turn for turn in turns])
    found = Quantiser(size, 1)
    code, scale = found.encode(pairs[:, 0])
    assert code.shape == (count, size // 8)
    products = (found.decode(code, scale) * pairs[:, 1]).sum(axis=1)
    spread = ((np.pi / 2 - 1) / size * ((x @ x) * (y @ y) - (x @ y) ** 2)) ** 0.5
    assert abs(products.mean() - x @ y) < 4 * spread / count**0.5
    assert products.std() == pytest.approx(spread, rel=0.1)
    lone_code, lone_scale = found.encode(x[None])
    assert abs((found.decode(lone_code, lone_scale) @ y)[0] - x @ y) < 4 * spread


def test_a_row_of_signs_takes_a_sixteenth_of_half_precision() -> None:
    sizes = {bits: Quantiser(8192, bits).code_bytes for bits in (1, 4, 8, 16, 32)}
    assert sizes == {1: 1024, 4: 4096, 8: 8192, 16: 16384, 32: 32768}
    assert Quantiser(13, 4).code_bytes == 7
    assert Quantiser(13, 1).code_bytes == 2
