"""Random: a number drawn for each example id, the baseline that every other scorer has to beat.

The draw is a hash of seed and id, so it depends neither on the order of the pool nor on which other rows are in it.
Reads nothing: no model is loaded.
"""

from __future__ import annotations

import hashlib

import numpy as np

from stages.score.scorer import Block, Given, Scorer


class Random(Scorer):
    """Uniform on [0, 1), one draw an example id and seed."""

    supported = True

    def prepare(self, given: Given) -> bytes:
        """Return the seed as a hash key."""
        return given.seed.to_bytes(8, "big")

    def score(self, block: Block, state: bytes) -> np.ndarray:
        """Return score_B: the top 24 bits of blake2b(id), which float32 holds exactly."""
        drawn = [
            int.from_bytes(hashlib.blake2b(example_id.encode(), digest_size=3, key=state).digest(), "big") / 2**24
            for example_id in block.example_ids
        ]
        return np.array(drawn, dtype=np.float32)
