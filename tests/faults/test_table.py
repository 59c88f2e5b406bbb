"""The table of faults names tests that exist, and every fault."""

from __future__ import annotations

import re
from pathlib import Path

import tests.faults

HERE = Path(__file__).parent


def test_every_fault_has_a_test_that_exists() -> None:
    table = tests.faults.__doc__ or ""
    numbers = {int(found) for found in re.findall(r"^ {4} ?(\d+) ", table, re.MULTILINE)}
    assert numbers == set(range(1, 23)) - {20}
    names = re.findall(r"([\w./]+\.py)::(\w+)", table)
    assert len(names) > 25
    for file, name in names:
        assert f"def {name}(" in (HERE / file).resolve().read_text(encoding="utf-8"), f"{file}::{name}"
