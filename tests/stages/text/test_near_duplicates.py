"""Near-duplicates against brute force over exact similarities."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from stages.text.near_duplicates import NearIndex, NearText, alike, banding, similarity

WORDS = [f"w{i}" for i in range(400)]


def jaccard_of(a: str, b: str) -> float:
    one, other = fives(a), fives(b)
    return len(one & other) / len(one | other)


@cache
def fives(text: str) -> frozenset[tuple[str, ...]]:
    words = text.split()
    return frozenset(tuple(words[i : i + 5]) for i in range(len(words) - 4))


def edited(text: str, edits: int, rng: random.Random) -> str:
    words = text.split()
    for _ in range(edits):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return " ".join(words)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_bands_find_a_pair_at_the_threshold_99_times_in_100(threshold: float) -> None:
    bands, rows = banding(threshold)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


def test_what_is_removed_is_what_brute_force_removes(tmp_path: Path) -> None:
    rng = random.Random(3)
    originals = [" ".join(rng.choices(WORDS, k=60)) for _ in range(60)]
    texts = [edited(rng.choice(originals), rng.choice([0, 1, 1, 1, 2]), rng) for _ in range(300)]
    kept: list[str] = []
    expected = []
    for text in texts:
        best = max((jaccard_of(text, other) for other in kept), default=0.0)
        expected.append(best >= 0.8)
        if best < 0.8:
            kept.append(text)
    index = NearIndex(tmp_path / "near.sqlite", 0.8)
    near = [NearText.of("", text) for text in texts]
    found = []
    for i, (item, hashes) in enumerate(zip(near, index.hashes(near), strict=True)):
        assert hashes is not None
        hit = index.find(item, hashes)
        found.append(hit is not None)
        if hit is None:
            index.add(item, hashes, str(i))
    index.close()
    assert sum(expected) > 100
    assert sum(a != b for a, b in zip(expected, found, strict=True)) <= 2  # each pair is found with p ≥ 0.99


def test_rows_of_one_long_instruction_with_other_inputs_are_no_duplicates() -> None:
    rng = random.Random(1)
    instruction = " ".join(rng.choices(WORDS, k=200))
    a = NearText.of(f"{instruction}\n\nAlgeria", "1962")
    assert similarity(a, NearText.of(f"{instruction}\n\nAngola", "1962")) == 0.0
    assert similarity(a, NearText.of(f"{instruction}\n\nAlgeria", "1975")) == 0.0
    assert similarity(a, NearText.of(f"{instruction.upper()}\n \nALGERIA ", "1962")) == 1.0


def test_short_texts_are_equal_or_not_alike() -> None:
    assert alike("yes", "no") == 0.0
    assert alike("yes", "yes") == 1.0
    assert alike("a b c d", "a b c d e f") == 0.0


def test_a_text_without_five_words_has_no_candidates(tmp_path: Path) -> None:
    index = NearIndex(tmp_path / "near.sqlite", 0.8)
    assert index.hashes([NearText.of("Bird?", "owl"), NearText.of("", "one two three four five")])[0] is None
    assert index.hashes([]) == []
    index.close()
