"""Plain files that cannot be used are refused with file, line and remedy."""

from __future__ import annotations

import json

import pytest

from data_contracts.errors import ConfigError, InputError
from stages.evaluate.plain import check_overlap, mark_predictions


def lines(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_an_unknown_metric_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="final-number"):
        mark_predictions(tmp_path / "p", "final_number")


@pytest.mark.parametrize(
    "row",
    [
        "[1]",
        "{",
        "[" * 100_000,
        '{"reference": 1' + "1" * 5000 + "}",
        {"reference": "1"},
        {"reference": None, "prediction": "1"},
    ],
)
def test_a_bad_row_names_its_line(tmp_path, row):
    path = lines(tmp_path / "p.jsonl", [{"reference": "1", "prediction": "1"}, row])
    with pytest.raises(InputError, match=r"p\.jsonl, line 2: "):
        mark_predictions(path, "final-number")


def test_a_reference_without_a_number_leaves_the_item_out_of_the_mean(tmp_path):
    rows = [{"reference": "none", "prediction": "1"}, {"reference": 1, "prediction": "1.0"}]
    found = mark_predictions(lines(tmp_path / "p.jsonl", rows), "final-number")
    assert [item.score for item in found.items] == [None, 1.0]
    assert (found.mean, found.scored) == (1.0, 1)


def test_an_empty_file_is_no_pass(tmp_path):
    some, none = lines(tmp_path / "a.jsonl", [{"text": "x y"}]), lines(tmp_path / "b.jsonl", [])
    for pair in ((some, none), (none, some)):
        with pytest.raises(InputError, match=r"b\.jsonl"):
            check_overlap(*pair)


def test_no_predictions_are_no_mean(tmp_path):
    with pytest.raises(InputError, match="holds none"):
        mark_predictions(lines(tmp_path / "p.jsonl", []), "final-number")


def test_formats_are_compared_with_each_other(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    item = lines(tmp_path / "a.jsonl", [chat])
    row = lines(tmp_path / "b.jsonl", [{"question": "why?", "answer": "so."}])
    assert [m.kind for m in check_overlap(item, row).meetings] == ["normalised"]


def test_a_row_of_no_known_form_is_refused(tmp_path):
    with pytest.raises(InputError, match="line 1"):
        check_overlap(lines(tmp_path / "a.jsonl", [{"foo": 1}]), lines(tmp_path / "b.jsonl", [{"text": "x"}]))
