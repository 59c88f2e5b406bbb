"""Likeness against planted shares, and its shares against dense cosines worked out word by word."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from stages.text.likeness import likeness


def rows(kind: str, count: int, seed: int, words: int = 30) -> list[str]:
    """Return texts of a kind: words of its own and words that all kinds share, half of each."""
    rng = np.random.default_rng([seed, *kind.encode()])
    own = rng.integers(60, size=(count, words))
    common = rng.integers(60, size=(count, words))
    return [
        " ".join(f"{kind}{a} common{b}" for a, b in zip(*pair, strict=True)) for pair in zip(own, common, strict=True)
    ]


def told(reference, chosen, pool):
    return likeness(reference, chosen, pool, np.random.default_rng(0))


@pytest.mark.parametrize(("taken", "there"), [(0.9, 0.1), (0.5, 0.05), (0.3, 0.3)])
def test_planted_shares_are_found_within_what_so_few_reference_rows_tell(taken, there):
    chosen = rows("kin", round(200 * taken), 1) + rows("alien", round(200 * (1 - taken)), 2)
    pool = rows("kin", round(1000 * there), 3) + rows("alien", round(1000 * (1 - there)), 4)
    found = told(rows("kin", 30, 5), chosen, pool)
    assert found.chosen == pytest.approx(taken, abs=0.25)
    assert found.pool == pytest.approx(there, abs=0.1)
    assert found.low <= taken - there <= found.high
    assert found.low <= found.moved <= found.high
    assert found.reference_rows == 30


def test_the_interval_holds_the_planted_difference_about_as_often_as_it_says():
    held = 0
    for seed in range(16):
        chosen = rows("kin", 60, 100 + seed) + rows("alien", 60, 200 + seed)
        pool = rows("kin", 20, 300 + seed) + rows("alien", 180, 400 + seed)
        found = told(rows("kin", 24, 500 + seed), chosen, pool)
        held += found.low <= 0.4 <= found.high
    assert held >= 12  # of 90 %: 11 or fewer of 16 come by in 2 % of trials


def test_rows_of_no_kin_move_nothing_and_so_does_a_pool_that_is_all_kin():
    nothing = told(rows("kin", 30, 1), rows("alien", 200, 2), rows("alien", 500, 3))
    assert (nothing.chosen, nothing.pool, nothing.low, nothing.high) == (0, 0, 0, 0)
    all_kin = told(rows("kin", 30, 1), rows("kin", 200, 2), rows("kin", 500, 3))
    assert all_kin.pool > 0.7
    assert abs(all_kin.moved) < 0.2


def test_shares_are_those_of_dense_cosines_worked_out_word_by_word():
    reference, chosen, pool = rows("kin", 12, 1, 6), rows("kin", 15, 2, 6) + rows("b", 15, 3, 6), rows("b", 40, 4, 6)
    texts = reference + chosen + pool
    bags = []
    for text in texts:
        words = text.split()
        bags.append(Counter([*words, *(" ".join(pair) for pair in pairwise(words))]))
    holding = Counter(word for bag in bags for word in bag)

    def weighed(bag):
        row = {w: (1 + math.log(n)) * (1 + math.log((1 + len(texts)) / (1 + holding[w]))) for w, n in bag.items()}
        length = math.sqrt(sum(value * value for value in row.values()))
        return {word: value / length for word, value in row.items()}

    units = [weighed(bag) for bag in bags]

    def nearest(index, others):
        return max(sum(units[index][w] * units[o].get(w, 0.0) for w in units[index]) for o in others)

    own = [nearest(row, [other for other in range(12) if other != row]) for row in range(12)]
    middle = (sorted(own)[5] + sorted(own)[6]) / 2
    near = [nearest(row, range(12)) for row in range(12, len(texts))]
    found = told(reference, chosen, pool)
    assert found.chosen == min(1, 2 * sum(value >= middle for value in near[:30]) / 30)
    assert found.pool == min(1, 2 * sum(value >= middle for value in near[30:]) / 40)


def test_equal_reference_rows_count_once_and_copies_of_them_are_of_the_kind():
    reference = rows("kin", 12, 1)
    once = told(reference, rows("kin", 50, 2), rows("alien", 100, 3))
    assert told(reference * 5, rows("kin", 50, 2), rows("alien", 100, 3)) == once
    assert told(reference, reference * 4, rows("alien", 100, 3)).chosen == 1


@pytest.mark.parametrize(
    ("reference", "chosen", "pool"),
    [
        (rows("kin", 7, 1), rows("kin", 50, 2), rows("kin", 50, 3)),  # a tiny reference
        (["same words"] * 30, rows("kin", 50, 2), rows("kin", 50, 3)),
        (rows("kin", 30, 1), rows("kin", 1, 2), rows("kin", 50, 3)),
        (rows("kin", 30, 1), rows("kin", 50, 2), rows("kin", 1, 3)),  # a pool of one row
        (rows("kin", 30, 1), ["", " ", "…!?"] * 20, rows("kin", 50, 3)),  # texts without a word
        ([], [], []),
        ([chr(0x4E00 + 40 * n) * 20 for n in range(30)], rows("kin", 50, 2), rows("kin", 50, 3)),  # no word twice
    ],
)
def test_where_too_little_is_there_nothing_is_told(reference, chosen, pool):
    assert told(reference, chosen, pool) is None


def test_words_of_any_script_with_spaces_count():
    def written(kind, count, seed):
        rng = np.random.default_rng([seed, ord(kind[0])])
        return [" ".join(f"{kind}{chr(0x430 + n)}" for n in rng.integers(30, size=20)) for _ in range(count)]

    found = told(written("мир", 20, 1), written("мир", 50, 2), written("дом", 90, 3))
    assert (found.chosen > 0.6, found.pool) == (True, 0)


def test_the_same_seed_tells_the_same():
    given = rows("kin", 20, 1), rows("kin", 50, 2), rows("alien", 100, 3)
    assert told(*given) == told(*given)


def test_a_reference_of_near_copies_says_what_one_of_each_says():
    reference = rows("kin", 15, 1)
    copies = [" ".join([*text.split()[:-1], "another"]) for text in reference]
    chosen, pool = rows("kin", 100, 2), rows("kin", 50, 3) + rows("alien", 450, 4)
    found = told(reference + copies, chosen, pool)
    assert found.reference_rows == 15
    assert found.chosen > 0.5
    assert found.pool < 0.25
    assert told(reference[:7] + copies[:7], chosen, pool) is None
