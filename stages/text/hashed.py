"""Texts as sparse rows: hashed words and word pairs, weighted by how rare they are, at length one.

Weights are tf–idf with 1 + log of the count (Salton & Buckley 1988) over the texts given. The hash is fixed, so the
same texts give the same rows; words that share a bucket are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix
from xxhash import xxh64_intdigest

from stages.text.examples import terms_of

BUCKETS = 1 << 18
LONGEST = 4000
"""Characters of a text that are looked at."""


def hashed_rows(texts: Sequence[str]) -> csr_matrix:
    """Return row_NB float64, B = `BUCKETS`; a text without words is a row of zeros."""
    rows, buckets = [], []
    for row, text in enumerate(texts):
        words = terms_of(text[:LONGEST])
        found = [*words, *(f"{left} {right}" for left, right in pairwise(words))]
        rows += [row] * len(found)
        buckets += [xxh64_intdigest(word.encode()) % BUCKETS for word in found]
    counts_NB = csr_matrix((np.ones(len(rows)), (rows, buckets)), shape=(len(texts), BUCKETS))
    counts_NB.sum_duplicates()
    counts_NB.data = 1 + np.log(counts_NB.data)
    texts_B = np.bincount(counts_NB.indices, minlength=BUCKETS)
    counts_NB.data *= np.log((1 + len(texts)) / (1 + texts_B[counts_NB.indices])) + 1
    length_N = np.sqrt(np.asarray(counts_NB.multiply(counts_NB).sum(axis=1)).ravel())
    counts_NB.data /= np.repeat(np.where(length_N > 0, length_N, 1.0), np.diff(counts_NB.indptr))
    return counts_NB
