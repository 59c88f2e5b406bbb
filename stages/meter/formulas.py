"""FLOPs of operators that torch's own counter leaves out, over shapes; and what looks like a matrix product.

A multiply-add is two operations, so an outer product counts as the matrix product of a column and a row. Products are
exact, factorisations as in `linear_algebra.py`, eigenvalues of symmetric matrices as in Golub & Van Loan 2013, section
8.3. An operator that `MATMUL_LIKE` names and nobody has a formula for is an error (`flops.py`). Element-wise work is
not counted. Shapes: the last two axes are the matrix, those before count how many there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from stages.meter.linear_algebra import lu_flops, qr_flops, solve_flops, svd_flops

MATMUL_LIKE = re.compile(
    r"(^|_)(s?spmm|smm|mm|bmm|matmul|addmm|baddbmm|addmv|mv|addbmm|v?dot|vecdot|ger|addr|einsum|linear|trilinear)(_|$)"
    r"|gem[mv]|conv|attention|attn|lstm|gru_|rnn|[cp]dist|euclidean_dist|cholesky|geqrf|orgqr|ormqr|householder"
    r"|triangular_solve|lu_(factor|solve)|lstsq|svd|eigh?(_|$)|lobpcg"
    r"|linalg_(?!check_errors|vector_norm|cross|diagonal)"
)
"""By an operator's name: products, what is made of them, and factorisations."""

Shape = Sequence[int]


def matrix_product(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    """Return 2·m·k·n of (m, k) by (k, n)."""
    return 2 * one[0] * one[1] * other[1]


def _sdpa(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _sdpa_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _addmm(into: Shape, one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return matrix_product(one, other)


def _dot(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return 2 * one[0]


def _vecdot(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(torch.broadcast_shapes(one, other))


def _outer(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return 2 * one[0] * other[0]


def _addr(into: Shape, one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return _outer(one, other)


def _distances(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    """As the product in ‖x‖² − 2 x·y + ‖y‖², whichever kernel runs."""
    return 2 * math.prod(torch.broadcast_shapes(one[:-2], other[:-2])) * one[-2] * other[-2] * one[-1]


def _distances_backward(grad: Shape, one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return _distances(one, other)


def _qr(matrix: Shape, mode: str = "reduced", *_: Any, **__: Any) -> int:
    return math.prod(matrix[:-2]) * qr_flops(matrix[-2], matrix[-1], mode)


def _svd(matrix: Shape, full_matrices: bool = False, compute_uv: bool = True, *_: Any, **__: Any) -> int:
    return math.prod(matrix[:-2]) * svd_flops(matrix[-2], matrix[-1], full_matrices, compute_uv)


def _solve(matrix: Shape, right: Shape, *_: Any, **__: Any) -> int:
    answers = 1 if tuple(right) == tuple(matrix[:-1]) else right[-1]  # torch's own rule for a batch of vectors
    return math.prod(matrix[:-2]) * solve_flops(matrix[-1], answers)


def _lu(matrix: Shape, *_: Any, **__: Any) -> int:
    return math.prod(matrix[:-2]) * lu_flops(*matrix[-2:])


def _cholesky(matrix: Shape, *_: Any, **__: Any) -> int:
    return math.prod(matrix[:-2]) * (matrix[-1] ** 3 // 3)


def _cholesky_solve(right: Shape, matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix[:-2]) * matrix[-1] ** 2 * right[-1]


def _triangular(matrix: Shape, right: Shape, *_: Any, **given: Any) -> int:
    answers = right[-1] if given.get("left", True) else right[-2]
    return math.prod(matrix[:-2]) * matrix[-1] ** 2 * answers


def _inverse(matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix[:-2]) * matrix[-1] ** 3


def _symmetric(matrix: Shape, uplo: str = "L", compute_v: bool = True, *_: Any, **__: Any) -> int:
    size = matrix[-1]
    return math.prod(matrix[:-2]) * (9 * size**3 if compute_v else 4 * size**3 // 3)


_aten = torch.ops.aten
FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
    _aten._int_mm: matrix_product,
    _aten.addmm_: _addmm,
    _aten.dot: _dot,
    _aten.vdot: _dot,
    _aten.linalg_vecdot: _vecdot,
    _aten.outer: _outer,
    _aten.addr: _addr,
    _aten.addr_: _addr,
    _aten._cdist_forward: _distances,
    _aten._cdist_backward: _distances_backward,
    _aten._euclidean_dist: _distances,
    _aten.linalg_qr: _qr,
    _aten._linalg_svd: _svd,
    _aten._linalg_solve_ex: _solve,
    _aten.linalg_lu_factor_ex: _lu,
    _aten.linalg_cholesky_ex: _cholesky,
    _aten.cholesky_solve: _cholesky_solve,
    _aten.linalg_solve_triangular: _triangular,
    _aten.linalg_inv_ex: _inverse,
    _aten._linalg_eigh: _symmetric,
}
"""Operators that torch 2.13 runs but does not count: packets to formulas over shapes."""

COMPOSED: Mapping[Any, Any] = {
    torch.linalg.vecdot: _aten.linalg_vecdot,
    **dict.fromkeys((torch.outer, torch.ger, torch.Tensor.outer, torch.Tensor.ger), _aten.outer),
}
"""Products that torch runs as element-wise operators: counted where they are called."""
