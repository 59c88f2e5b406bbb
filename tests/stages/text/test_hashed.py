"""Hashed rows of texts: their cosines against the formula by dictionaries."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np

from stages.text.hashed import hashed_rows

TEXTS = ["The cat sat on the mat.", "the cat sat on the mat", "A dog, a dog and a cat!", "", "zebra"]


def by_hand(texts: list[str]) -> np.ndarray:
    words = [[word.strip(".,!").lower() for word in text.split()] for text in texts]
    counts = [Counter(word) + Counter(itertools.pairwise(word)) for word in words]
    spread = Counter(term for count in counts for term in count)
    rows = [
        {term: (1 + math.log(n)) * (math.log((1 + len(texts)) / (1 + spread[term])) + 1) for term, n in count.items()}
        for count in counts
    ]
    norms = [math.sqrt(sum(value**2 for value in row.values())) or 1.0 for row in rows]
    return np.array(
        [
            [
                sum(value * b.get(term, 0.0) for term, value in a.items()) / (na * nb)
                for b, nb in zip(rows, norms, strict=True)
            ]
            for a, na in zip(rows, norms, strict=True)
        ]
    )


def test_cosines_are_those_of_tf_idf_over_words_and_pairs() -> None:
    row = hashed_rows(TEXTS)
    np.testing.assert_allclose((row @ row.T).toarray(), by_hand(TEXTS), atol=1e-12)
