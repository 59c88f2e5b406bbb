"""Final numbers however they are written."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.text.answers import extract, final_number, normalised_text, shown


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("They earned $64,000", 64000),
        ("That makes 48, counting both bags.", 48),
        ("The lamp is $31.00.", 31),
        ("1,250", 1250),
        ("-5", -5),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("$ 5", 5),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("#### 18", 18),
        ("<<16-3-4=9>>9 ducks", 9),
        ("10-5", 5),
        ("covid-19", 19),
        ("- 7 apples", 7),
        ("x=-7", -7),
        ("(-7)", -7),
        ("it is 50%", 50),
        ("3/4", Fraction(3, 4)),
        ("on 3/4/2020", 2020),
        ("2.5e3", 2500),
        (r"\boxed{64{,}000}", 64000),
        ("64\u202f000", 64000),
        ("12,3456", 3456),
        ("1,2,3", 3),
        ("４８", 48),
        ("1/0", 0),
        ("version 1.5.2", 2),
        ("5 km/h", 5),
        ("1,000,000.50", Fraction(2000001, 2)),
    ],
)
def test_a_number_is_read_however_it_is_written(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize("text", ["", "I do not know, sorry.", "x²", "- , .", "NaN", "inf"])
def test_text_without_a_number_gives_nothing(text):
    assert extract(text, "final-number") is None


@given(st.integers(-(10**12), 10**12), st.integers(0, 4), st.sampled_from(["{}", "it is {}.", "{}, I think", "= {}!"]))
def test_equal_numbers_give_equal_extracts(whole, zeros, frame):
    written = f"{whole:,}" + ("." + "0" * zeros if zeros else "")
    assert extract(frame.format(written), "final-number") == str(whole)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**6), max_value=10**6, places=5))
def test_shown_is_one_text_a_value(value):
    assert Fraction(shown(Fraction(value))) == Fraction(value)
    assert shown(Fraction(value)) == shown(Fraction(value.normalize()))


def test_a_fraction_whose_decimals_never_end_stays_a_fraction():
    assert shown(Fraction(1, 3)) == "1/3"


@given(st.text(max_size=60))
def test_any_text_can_be_read(text):
    extract(text, "final-number")
    extract(text, "normalised-text")


@pytest.mark.parametrize("frame", ["{}", "-{}", "{}.5", "{}/7", "7/{}"])
def test_a_number_of_any_length_can_be_read(frame):
    text = frame.format("1" * 5000)
    assert extract(text, "final-number") == text


def test_case_spacing_and_punctuation_around_do_not_matter():
    assert normalised_text("  “New  York”. ") == normalised_text("new york") == "new york"
    assert extract(" .. ", "normalised-text") is None
