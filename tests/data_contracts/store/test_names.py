"""Names: what MLflow refuses is renamed, and no two texts ever become one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name

from data_contracts.cost import Cost
from data_contracts.records import Origin, Summary
from data_contracts.store.attempts import Attempts
from data_contracts.store.names import LONGEST, legal, original, renamed
from data_contracts.store.tracking import Tracking
from tests.stores import blank

TEXTS = st.text(min_size=1, max_size=60) | st.from_regex(r"[_uh0-9a-f./ @]{1,20}", fullmatch=True)


@given(TEXTS)
def test_every_text_gets_a_name_that_mlflow_takes_and_that_leads_back(text: str) -> None:
    name = legal(text)
    _validate_metric_name(name)
    _validate_param_name(name)
    assert len(name) <= LONGEST
    if "_uh_" not in name:
        assert original(name) == text


@given(st.lists(TEXTS, min_size=2, max_size=30, unique=True))
def test_distinct_texts_have_distinct_names(texts: list[str]) -> None:
    assert len({legal(text) for text in texts}) == len(texts)


def test_a_text_too_long_keeps_its_start_and_stays_apart_from_its_own_name() -> None:
    long = "x" * 400
    assert legal(long).startswith("x" * 100)
    assert len({legal(long), legal(long + "x"), legal(legal(long))}) == 3


@pytest.mark.parametrize("text", ["accuracy", "cost/train/flops", "hits_at_1", "loss-2.5"])
def test_a_text_that_is_legal_stays_as_it_is(text: str) -> None:
    assert legal(text) == text


def test_no_text_has_no_name() -> None:
    with pytest.raises(ValueError, match="empty"):
        legal("")


@pytest.mark.shared
def test_m01_metric_names_refused(shared: Path, tmp_path: Path) -> None:
    """Five metrics keep five names, their exact values, and the way back from each name to the original."""
    metrics = json.loads((shared / "cases" / "files" / "M01-metric-names-refused" / "metrics.json").read_text())
    tracking = Tracking(blank(tmp_path))
    attempts = Attempts(tracking)
    run = attempts.open_attempt("promote", "0" * 64, Origin(), shared=False)
    attempts.say(run, Summary(title="evaluated", facts=metrics), {"eval": Cost(flops=3)})
    data = tracking.do(lambda client: client.get_run(run)).data
    stored = {name: value for name, value in data.metrics.items() if not name.startswith("cost/")}
    assert sorted(stored.values()) == [0.25, 0.5, 0.75, 0.9, 1.0]
    back = {short: data.tags.get(f"name.{short}", short) for short in stored}
    assert {back[short]: value for short, value in stored.items()} == metrics
    assert data.metrics["cost/eval/flops"] == 3
    assert renamed(metrics).keys() == {legal("hits@1"), legal("f1[macro]"), legal("exact_match,none")}
