"""What an answer says: its final number, or its text in match form.

Promises that a number means the same however it is written (thousands separators, currency signs, trailing zeros, a
comma or full stop after it), that its sign counts, and that text without a number gives nothing instead of an error.
How an item is scored from what was read belongs to `evaluate`.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from stages.text.normalise import match_form

Metric = Literal["final-number", "normalised-text"]
METRICS: tuple[Metric, ...] = ("final-number", "normalised-text")

_DIGITS = r"(?:\d{1,3}(?:(?:\{,\}|[,'’\u00a0\u202f])\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]])[-−+])?                             # a sign, unless it joins words, numbers or is a bullet
    (?:[$€£¥₹]\s?(?P<inner>[-−])?)?                          # "$-5" too
    (?P<digits>{_DIGITS})
    (?P<exponent>[eE][-+]?\d{{1,3}}(?![\w.]))?
    (?:\s?/\s?(?P<below>\d+)(?![\d/.,]))?                     # a fraction, not a date
    """,
    re.VERBOSE,
)
_SEPARATORS = re.compile(r"\{,\}|[,'’\u00a0\u202f]")


def final_number(text: str) -> Fraction | None:
    """Return the last number of `text`, exactly; None where it holds none.

    Read: "1,250", "$64,000", "31.00.", "48,", "-5", "−5", "-$5", "3/4", "2.5e3", full-width digits. A minus between
    words or numbers ("covid-19", "10-5") is no sign; a date ("3/4/2020") is no fraction.
    """
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Fraction:
    digits = _SEPARATORS.sub("", match["digits"])
    value = Fraction(Decimal(digits + (match["exponent"] or "")))
    below = Fraction(Decimal(match["below"])) if match["below"] else None
    if below and not _in_date(match):
        value /= below
    elif below is not None:
        value = below
    negative = (match["sign"] in ("-", "−")) != bool(match["inner"])
    return -value if negative else value


def _in_date(match: re.Match[str]) -> bool:
    return match.string[: match.start("digits")].rstrip().endswith("/")


def shown(value: Fraction) -> str:
    """Return a number as text, the same for equal numbers: "64000", "1.5", "-5", or "1/3" where decimals never end.

    A number may be longer than Python turns into text by itself (4300 digits): a model that repeats a digit writes one.
    """
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    if below != 1:
        return f"{_digits(value.numerator)}/{_digits(value.denominator)}"
    if value.denominator == 1:
        return _digits(value.numerator)
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
    whole = _digits(abs((value * 10**digits).numerator)).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{whole[:-digits]}.{whole[-digits:]}"


def _digits(whole: int) -> str:
    return f"{Decimal(whole):f}"


def normalised_text(text: str) -> str:
    """Return `text` in match form without punctuation or symbols around it: "  Jupiter. " is "jupiter"."""
    form = match_form(text)
    start, end = 0, len(form)
    while start < end and _edge(form[start]):
        start += 1
    while end > start and _edge(form[end - 1]):
        end -= 1
    return form[start:end]


def _edge(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("P")


def extract(text: str, metric: Metric) -> str | None:
    """Return what `metric` reads from `text`; equal extracts are equal answers. None where there is nothing to read."""
    if metric == "final-number":
        number = final_number(text)
        return None if number is None else shown(number)
    return normalised_text(text) or None
