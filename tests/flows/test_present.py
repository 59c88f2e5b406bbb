"""A summary becomes a page that Prefect can show, whatever its texts hold."""

from __future__ import annotations

import pytest

from data_contracts.cost import Cost
from data_contracts.records import Summary, Table
from flows.present import artifact_key, markdown
from flows.readable import duration, size, text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (True, "yes"),
        (12345, "12,345"),
        (5 * 10**12, "5e+12"),
        (0.123456, "0.1235"),
        ("as it is", "as it is"),
    ],
)
def test_values_are_shortened_for_people(value, shown):
    assert text(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (5 * 10**9, "5 GB"), (2 * 10**12, "2 TB")]
)
def test_sizes_are_decimal(count, shown):
    assert size(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(1.25, "1.2 s"), (150.0, "2.5 min"), (7200.0, "2.0 h")])
def test_durations_have_a_unit_that_fits(seconds, shown):
    assert duration(seconds) == shown


def test_a_cell_with_a_bar_or_a_line_break_stays_one_cell():
    summary = Summary(title="a|b", tables=(Table(title="t", columns=("x",), rows=(("one|two\nthree",),)),))
    lines = markdown(summary).splitlines()
    assert lines[0] == "# a\\|b"
    assert lines[-1] == "| one\\|two three |"


def test_costs_are_a_table_by_cause():
    page = markdown(Summary(title="train", facts={"steps": 3}), {"train": Cost(flops=10, tokens=2, seconds=1.0)})
    assert "| steps | 3 |" in page
    assert "| train | 10 | 2 | 1.0 s | 0 B |" in page


def test_a_picture_stands_in_the_page_itself():
    page = markdown(Summary(title="govern: stop"), picture=b"\x89PNG")
    assert "![govern: stop](data:image/png;base64,iVBORw==)" in page


def test_keys_are_what_prefect_takes():
    assert artifact_key("My run_2.1", "plan") == "my-run-2-1-plan"
