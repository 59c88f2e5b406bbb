"""FLOPs of factorisations and solutions of dense systems, over sizes.

Leading terms of LAPACK's routines (Blackford & Dongarra 1999, LAPACK Working Note 41, appendix C), rounded down;
singular values, which iterate, as the R-SVD of Golub & Van Loan 2013 (figure 8.6.1). A multiply-add is two operations.
Imports nothing.
"""

from __future__ import annotations


def qr_flops(rows: int, columns: int, mode: str = "reduced") -> int:
    """Return the operations of Q and R of a matrix (GEQRF, ORGQR); those of R alone for `mode` "r"."""
    large, small = max(rows, columns), min(rows, columns)
    factored = (6 * large * small**2 - 2 * small**3) // 3
    if mode == "r":
        return factored
    wide = rows if mode == "complete" else small
    return factored + (12 * rows * wide * small - 6 * (rows + wide) * small**2 + 4 * small**3) // 3


def svd_flops(rows: int, columns: int, full: bool = False, vectors: bool = True) -> int:
    """Return the operations of the singular values and, unless not `vectors`, of both sides' vectors."""
    large, small = max(rows, columns), min(rows, columns)
    if not vectors:
        return 2 * large * small**2 + 2 * small**3
    if full:
        return 4 * large**2 * small + 22 * small**3
    return 6 * large * small**2 + 20 * small**3


def lu_flops(rows: int, columns: int) -> int:
    """Return the operations of L and U of a matrix (GETRF)."""
    large, small = max(rows, columns), min(rows, columns)
    return (3 * large * small**2 - small**3) // 3


def solve_flops(size: int, answers: int) -> int:
    """Return the operations of solving a square system for `answers` right sides (GETRF, GETRS)."""
    return lu_flops(size, size) + 2 * size**2 * answers
