"""E01 and E02: right answers marked wrong, and leaks that whole-row comparison misses."""

from __future__ import annotations

import pytest

from stages.evaluate.plain import check_overlap, mark_predictions

pytestmark = pytest.mark.shared


def test_E01_the_right_number_is_marked_right_however_it_is_written(shared):
    path = shared / "cases" / "files" / "E01-right-number-marked-wrong" / "preds.jsonl"
    found = mark_predictions(path, "final-number")
    assert {item.id: item.score for item in found.items} == {
        "n1": 1,
        "n2": 1,
        "n3": 1,
        "n4": 1,
        "n5": 0,
        "n6": 0,
        "n7": 0,
    }
    assert found.mean == pytest.approx(4 / 7)
    extracted = {item.id: item.extracted for item in found.items}
    assert extracted == {"n1": "64000", "n2": "48", "n3": "31", "n4": "1250", "n5": "-5", "n6": None, "n7": "1.5"}
    assert {item.id for item in found.items if item.note == "nothing extracted"} == {"n6"}


def test_E02_a_leak_is_found_under_another_id_key_case_or_spacing(shared):
    folder = shared / "cases" / "files" / "E02-leak-hidden-by-extra-key"
    found = check_overlap(folder / "eval.jsonl", folder / "selected.jsonl")
    assert {(m.example_id, m.item_id, m.kind) for m in found.meetings} == {
        ("z2", "v1", "exact"),
        ("z3", "v2", "normalised"),
        ("z4", "v1", "prompt"),
    }
    assert found.affected == ("v1", "v2")
    assert (found.items, found.rows, found.passed) == (2, 4, False)
