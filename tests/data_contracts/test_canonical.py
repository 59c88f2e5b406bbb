"""Equal values have equal bytes, different ones do not, and what has no form is refused by name."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.canonical import canonical, digest_of, file_sha256, tree_digest
from data_contracts.errors import CanonicalError

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Compare as JSON data with types, texts by their NFC form; an oracle that shares no code with `canonical`."""
    if isinstance(a, str) and isinstance(b, str):
        return unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        left = {unicodedata.normalize("NFC", key): value for key, value in a.items()}
        right = {unicodedata.normalize("NFC", key): value for key, value in b.items()}
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(a == b)


def form(value: Any) -> bytes | None:
    try:
        return canonical(value)
    except CanonicalError:
        return None


@given(VALUES, VALUES)
def test_two_values_share_their_bytes_exactly_when_they_are_the_same(a: Any, b: Any) -> None:
    left, right = form(a), form(b)
    if left is not None and right is not None:
        assert (left == right) == same(a, b)


@given(st.dictionaries(st.text(max_size=4), SCALARS, max_size=6))
def test_the_order_of_keys_does_not_show(value: dict[str, Any]) -> None:
    assert form(value) == form(dict(reversed(value.items())))


@given(VALUES)
def test_the_bytes_are_json_that_reads_back_as_the_same(value: Any) -> None:
    data = form(value)
    if data is not None:
        assert same(json.loads(data), value)


def test_equal_numbers_of_one_type_have_equal_bytes_and_types_differ() -> None:
    assert canonical(-0.0) == canonical(0.0)
    assert len({canonical(1), canonical(1.0), canonical(True), canonical("1")}) == 4


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (float("nan"), "$"),
        ({"a": [1, float("inf")]}, "$.a[1]"),
        ({"a": {1}}, "$.a"),
        ({1: 2}, "$"),
        ({"a": b"x"}, "$.a"),
        ({"a": Path("x")}, "$.a"),
        ({"a": "\ud800"}, "$.a"),
        ({"\ud800": 1}, "$"),
        ({"\u00e9": 1, "e\u0301": 2}, "$"),
    ],
)
def test_a_value_without_a_form_is_refused_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        canonical(value)
    assert caught.value.found.startswith(f"{where} holds")


def test_the_digest_is_the_sha256_of_the_bytes() -> None:
    assert digest_of({"b": 1, "a": "é"}) == hashlib.sha256('{"a":"é","b":1}'.encode()).hexdigest()


@given(st.binary(max_size=3000))
def test_a_files_hash_is_that_of_its_bytes(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(data)
        assert file_sha256(path) == hashlib.sha256(data).hexdigest()


def test_a_trees_digest_depends_on_paths_sizes_hashes_and_contract_and_not_on_order() -> None:
    files = [("a", 1, "x"), ("b", 2, "y")]
    base = tree_digest(files, "c/1")
    assert tree_digest(reversed(files), "c/1") == base
    others = [
        tree_digest(files, "c/2"),
        tree_digest([("a", 1, "x"), ("b", 2, "z")], "c/1"),
        tree_digest([("a", 1, "x"), ("b", 3, "y")], "c/1"),
        tree_digest([("a", 1, "x"), ("c", 2, "y")], "c/1"),
        tree_digest(files[:1], "c/1"),
    ]
    assert len({base, *others}) == 6
