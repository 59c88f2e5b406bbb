"""N-gram sets against sets of tuples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.text.ngrams import grams, jaccard, overlap, shared

WORDS = st.lists(st.sampled_from(list("abcd")), max_size=25)


def tuples(words: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


@given(WORDS, WORDS, st.integers(1, 6))
def test_counts_are_those_of_sets_of_tuples(a: list[str], b: list[str], n: int) -> None:
    left, right = tuples(a, n), tuples(b, n)
    a_set, b_set = grams(a, n), grams(b, n)
    assert (len(a_set), len(b_set), shared(a_set, b_set)) == (len(left), len(right), len(left & right))
    assert jaccard(a_set, b_set) == (len(left & right) / len(left | right) if left | right else 0)
    assert overlap(a_set, b_set) == (len(left & right) / len(left) if left else 0)


def test_fewer_words_than_n_have_no_ngram() -> None:
    assert len(grams(["a", "b"], 5)) == 0
    with pytest.raises(ValueError, match="at least one word"):
        grams(["a"], 0)
