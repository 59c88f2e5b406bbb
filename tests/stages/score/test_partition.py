"""Shards and batches are nodes of a fixed tree: they cover the rows, are bounded, and a new row moves one of them."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.score import partition

keys = st.lists(st.binary(max_size=4), unique=True, max_size=60).map(sorted)


@given(keys, st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_parts_cover_the_keys_once_in_order_and_share_a_prefix_that_no_other_has(found: list[bytes], most: int) -> None:
    ranges = list(partition.parts(found, lambda start, stop: stop - start <= most))
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(len(found)))
    assert all(stop - start <= most for start, stop in ranges)


@given(keys, st.binary(max_size=4), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_new_key_changes_one_part(found: list[bytes], new: bytes, most: int) -> None:
    def parts_of(some: list[bytes]) -> set[tuple[bytes, ...]]:
        return {tuple(some[a:z]) for a, z in partition.parts(some, lambda start, stop: stop - start <= most)}

    before, after = parts_of(found), parts_of(sorted({*found, new}))
    assert len(before - after) <= 1
    assert all(new in part for part in after - before) or len(before - after) == 1


def ids_of(count: int, seed: int = 0) -> list[str]:
    return sorted(hashlib.blake2b(f"{seed} {i}".encode(), digest_size=16).hexdigest() for i in range(count))


def shards_of(ids: list[str], lengths: np.ndarray, most: int) -> list[tuple[int, int]]:
    before = np.concatenate([[0], np.cumsum(lengths)])
    return list(partition.shards(pa.chunked_array([ids]), np.arange(len(ids)), before, most))


def test_shards_cover_the_pool_once_and_are_bounded_by_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    ranges = shards_of(ids_of(3000), lengths, 100)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(3000))
    limit = 100 * partition.BATCHES_A_SHARD
    assert all(stop - start == 1 or lengths[start:stop].sum() <= limit for start, stop in ranges)


def test_batches_are_bounded_hold_little_padding_and_come_longest_first() -> None:
    lengths = np.random.default_rng(1).integers(1, 120, 300)
    found = partition.batches(ids_of(300), lengths.tolist(), 400)
    assert sorted(place for batch in found for place in batch) == list(range(300))
    padded = [len(batch) * max(lengths[batch]) for batch in found]
    assert max(padded) <= 400
    assert all(
        len(batch) == 1 or size - lengths[batch].sum() <= 400 / partition.WASTE
        for batch, size in zip(found, padded, strict=True)
    )
    longest = [max(lengths[batch]) for batch in found]
    assert longest == sorted(longest, reverse=True)


def test_a_new_row_changes_one_batch_where_its_shard_is_not_cut() -> None:
    ids, lengths = ids_of(400), np.random.default_rng(2).integers(1, 120, 400)

    def batches_of(keep: np.ndarray) -> set[tuple[str, ...]]:
        some, sizes = [ids[index] for index in keep], lengths[keep]
        return {
            tuple(some[start + place] for place in batch)
            for start, stop in shards_of(some, sizes, 300)
            for batch in partition.batches(some[start:stop], sizes[start:stop].tolist(), 300)
        }

    whole = batches_of(np.arange(400))
    changed = [len(whole - batches_of(np.delete(np.arange(400), row))) for row in range(0, 400, 8)]
    assert np.median(changed) == 1
    assert max(changed) < len(whole) / 4  # a shard was cut


def test_ids_of_one_prefix_and_one_length_are_still_parted() -> None:
    assert len(shards_of(["a", "aa", "aaa", "aaaa"], np.full(4, 1000), 10)) == 4
    assert len(partition.batches(["a", "b", "c"], [5, 5, 5], 5)) == 3
