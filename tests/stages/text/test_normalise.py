"""Normal forms and example ids."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.text.normalise import example_id, match_digest, match_form, stored_form

CHAT = [{"role": "user", "content": "Café?"}, {"role": "assistant", "content": "Yes.\nIt is."}]


def test_an_id_is_32_hex_digits_and_ignores_composition_line_ends_and_space_around() -> None:
    other = [
        {"content": unicodedata.normalize("NFD", "Café? "), "role": "user"},
        {"role": "assistant", "content": "Yes.\r\nIt is."},
    ]
    assert example_id(CHAT, (), "") == example_id(other, (), "")
    assert len(bytes.fromhex(example_id(CHAT, (), ""))) == 16


@pytest.mark.parametrize(
    "changed",
    [
        [{"role": "user", "content": "café?"}, CHAT[1]],
        [CHAT[0], {"role": "assistant", "content": "Yes. It is."}],
        [CHAT[0], {**CHAT[1], "train": False}],
        CHAT[:1],
    ],
)
def test_case_inner_space_and_flags_make_another_example(changed: list) -> None:
    assert example_id(changed, (), "") != example_id(CHAT, (), "")


def test_tools_copies_and_kind_are_part_of_the_id() -> None:
    ids = {example_id(CHAT, (), ""), example_id(CHAT, [{"name": "f"}], ""), example_id(CHAT, (), "", 1)}
    ids |= {example_id(CHAT, (), "", 2), example_id((), (), "Café?")}
    assert len(ids) == 5


def test_an_unpaired_surrogate_has_no_id() -> None:
    with pytest.raises(UnicodeEncodeError):
        example_id((), (), "a\ud800")


@given(st.text())
def test_match_form_is_stable_and_folds_case_and_space(text: str) -> None:
    once = match_form(text)
    assert match_form(once) == once
    assert "  " not in once
    assert match_form(f"  {text}\n") == once


def test_match_form_reads_compatibility_characters_alike() -> None:
    assert match_form("ＦＵＬＬ\u00a0ﬁne\u2028STRASSE") == match_form("full fine straße")
    assert match_digest("Boiling  point of water in C?", "100.") == match_digest(
        "boiling point of water in c? ", " 100."
    )
    assert match_digest("a", "b") != match_digest("a b", "")


def test_stored_form_keeps_indentation() -> None:
    assert stored_form("if a:\r\n    b\r\n") == "if a:\n    b"
