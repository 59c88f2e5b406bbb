"""Near-duplicate examples: MinHash candidates from a banded index, each verified by exact similarity.

Similarity is the Jaccard index of two sets of word 5-grams; a text with fewer than five words has none, so it is equal
to another or it is not. An example is a question and an answer and both must be alike: rows that share one long
instruction and differ in a short input are different questions, so lines that two questions share at their ends do not
count. The index is an SQLite file with a bounded page cache: memory does not grow with the texts.

Sources: Broder 1997 (resemblance, MinHash); Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, ch. 3 (banding).
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from stages.text.ngrams import Grams, grams, jaccard
from stages.text.normalise import match_form

NGRAM_WORDS = 5
PERMUTATIONS = 128
SEED = 1
MOST_CANDIDATES = 64
_CACHE_KIB = 32 * 1024


class NearText(NamedTuple):
    """An example as near-duplicates see it: lines in match form. Plain text is an answer without a question."""

    question: str
    answer: str

    @classmethod
    def of(cls, question: str, answer: str) -> NearText:
        """Bring both parts to match form, line by line; empty lines go."""
        return cls(*("\n".join(filter(None, map(match_form, part.splitlines()))) for part in (question, answer)))

    def shingles(self) -> Grams:
        """Return the set that candidates are found by; empty for what is too short to be more than equal.

        A long answer stands for itself: both answers must be alike. A short one must be equal, so it salts the
        question's 5-grams, and questions with another answer do not even become candidates.
        """
        answer = self.answer.split()
        if len(answer) >= NGRAM_WORDS:
            return _grams_of(self.answer)
        salt = np.uint64(xxhash.xxh3_64_intdigest(" ".join(answer).encode()))
        return np.sort(np.bitwise_xor(_grams_of(self.question), salt))


@lru_cache(maxsize=128)
def _grams_of(text: str) -> Grams:
    return grams(text.split(), NGRAM_WORDS)


def alike(a: str, b: str) -> float:
    """Return the similarity of two texts in match form: Jaccard of word 5-grams, or equality where one is short."""
    if a == b:
        return 1.0
    a_words, b_words = a.split(), b.split()
    if a_words == b_words:
        return 1.0
    if min(len(a_words), len(b_words)) < NGRAM_WORDS:
        return 0.0
    return jaccard(_grams_of(a), _grams_of(b))


def similarity(a: NearText, b: NearText) -> float:
    """Return how alike two examples are, in [0, 1]: the smaller of their answers' and their questions' likeness.

    Lines shared at the questions' starts and ends are set aside first: an instruction or a closing phrase of a
    template says nothing about whether the inputs between them are the same.
    """
    answers = alike(a.answer, b.answer)
    if not answers or a.question == b.question:
        return answers
    ours, theirs = a.question.split("\n"), b.question.split("\n")
    while ours and theirs and ours[0] == theirs[0]:
        del ours[0], theirs[0]
    while ours and theirs and ours[-1] == theirs[-1]:
        del ours[-1], theirs[-1]
    return min(answers, alike("\n".join(ours), "\n".join(theirs)))


def banding(threshold: float, permutations: int = PERMUTATIONS) -> tuple[int, int]:
    """Return (bands, rows a band): the longest bands that find a pair at `threshold` with probability ≥ 0.99.

    A pair of similarity s shares at least one of b bands of r rows with probability 1 − (1 − sʳ)ᵇ. Longer bands give
    fewer false candidates; at 0.8 the answer is 21 bands of 6 rows (0.998).
    """
    for rows in range(16, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= 0.99:
            return bands, rows
    return permutations, 1


def band_hashes(sets: Sequence[Grams], bands: int, rows: int) -> NDArray[np.int64]:
    """Return one 64-bit hash a band for each set of n-grams, shape (sets, bands), as signed integers for SQLite."""
    from rensa import RMinHash

    if not sets:
        return np.empty((0, bands), np.int64)
    flat = np.concatenate(sets) if len(sets) > 1 else sets[0]
    offsets = np.concatenate([[0], np.cumsum([len(item) for item in sets])]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, bands * rows, SEED)
    signatures = np.array(matrix.to_rows(), np.uint64)
    parts_SBR = signatures.reshape(len(sets), bands, rows)
    mixed: NDArray[np.uint64] = np.tile(np.arange(1, bands + 1, dtype=np.uint64), (len(sets), 1))
    for row in range(rows):  # an FNV-like mix: enough to tell bands apart, verified exactly afterwards
        mixed = (mixed ^ parts_SBR[:, :, row]) * np.uint64(0x100000001B3)
        mixed ^= mixed >> np.uint64(29)
    return mixed.view(np.int64)


class NearIndex:
    """Find a kept example that is nearly equal; add those that are kept, in input order.

    Args:
        path: the scratch file; made anew.
        threshold: least similarity of a near-duplicate, in (0, 1].

    At most `MOST_CANDIDATES` earlier examples are verified for each, those sharing most bands first: a limit that only
    an example with that many look-alikes below the threshold can meet.
    """

    def __init__(self, path: Path, threshold: float) -> None:
        self.threshold = threshold
        self.bands, self.rows = banding(threshold)
        path.unlink(missing_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._db.execute("CREATE TABLE band (hash INTEGER, number INTEGER, PRIMARY KEY (hash, number)) WITHOUT ROWID")
        self._db.execute("CREATE TABLE item (number INTEGER PRIMARY KEY, key TEXT, question TEXT, answer TEXT)")
        self._db.execute("BEGIN")
        marks = ",".join("?" * self.bands)
        self._sharing = f"SELECT number FROM band WHERE hash IN ({marks})"  # noqa: S608 - only question marks
        self._count = 0

    def hashes(self, texts: Sequence[NearText]) -> list[list[int] | None]:
        """Return the band hashes of many texts at once; None for one too short to be more than equal."""
        sets = [text.shingles() for text in texts]
        long = [i for i, item in enumerate(sets) if len(item)]
        found: list[list[int] | None] = [None] * len(texts)
        for i, row in zip(long, band_hashes([sets[i] for i in long], self.bands, self.rows).tolist(), strict=True):
            found[i] = row
        return found

    def find(self, text: NearText, hashes: list[int]) -> tuple[str, float] | None:
        """Return (key, similarity) of the most similar kept example at or above the threshold, else None."""
        best: tuple[str, float] | None = None
        shared = Counter(number for (number,) in self._db.execute(self._sharing, hashes))
        for number in heapq.nsmallest(MOST_CANDIDATES, shared, key=lambda number: (-shared[number], number)):
            key, question, answer = self._db.execute(
                "SELECT key, question, answer FROM item WHERE number = ?", (number,)
            ).fetchone()
            like = similarity(text, NearText(question, answer))
            if like >= self.threshold and (best is None or like > best[1]):
                best = (key, like)
                if like == 1.0:
                    break
        return best

    def add(self, text: NearText, hashes: list[int], key: str) -> None:
        """Keep an example: `key` is what `find` returns for its near-duplicates."""
        self._count += 1
        self._db.execute("INSERT INTO item VALUES (?, ?, ?, ?)", (self._count, key, text.question, text.answer))
        self._db.executemany("INSERT OR IGNORE INTO band VALUES (?, ?)", [(value, self._count) for value in hashes])

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
