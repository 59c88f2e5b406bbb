"""Word n-grams as sets of 64-bit hashes: what near-duplicates and contamination both count.

Hashes, not texts, are held: 8 bytes an n-gram. Each word is hashed once, and an n-gram is a polynomial of its words'
hashes modulo 2⁶⁴ (Karp & Rabin 1987), so two different n-grams share a hash with probability about 2⁻⁶⁴ and a set of a
million is exact for every purpose here. Words are those of `normalise.words`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Grams = NDArray[np.uint64]
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so no bit of a word's hash is lost


def grams(words: Sequence[str], n: int) -> Grams:
    """Return the sorted unique hashes of the n-grams of `words`; empty where there are fewer than `n` words."""
    if n < 1:
        raise ValueError("an n-gram has at least one word")
    count = len(words) - n + 1
    if count < 1:
        return np.empty(0, np.uint64)
    digest = xxhash.xxh3_64_intdigest
    words_W = np.array([digest(word.encode()) for word in words], np.uint64)
    grams_C = words_W[:count].copy()
    for place in range(1, n):
        grams_C *= _BASE
        grams_C += words_W[place : place + count]
    return np.unique(grams_C)


def shared(a: Grams, b: Grams) -> int:
    """Return how many hashes two sorted unique arrays share."""
    if len(a) > len(b):
        a, b = b, a
    if not len(a):
        return 0
    at = np.searchsorted(b, a)
    at[at == len(b)] = len(b) - 1
    return int(np.count_nonzero(b[at] == a))


def jaccard(a: Grams, b: Grams) -> float:
    """Return |a ∩ b| / |a ∪ b|, in [0, 1]; two empty sets share nothing: 0."""
    both = shared(a, b)
    union = len(a) + len(b) - both
    return both / union if union else 0.0


def overlap(item: Grams, other: Grams) -> float:
    """Return the share of `item`'s n-grams that stand in `other`, in [0, 1]; 0 for an item too short to have one."""
    return shared(item, other) / len(item) if len(item) else 0.0
