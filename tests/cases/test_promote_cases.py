"""M01: metric names that the tracking server refuses, or that collapse into one."""

from __future__ import annotations

import json

import pytest

from data_contracts.errors import InputError
from data_contracts.records import StoreAddress
from stages.promote.plain import store_metrics, stored_metrics


@pytest.fixture
def address(tmp_path):
    return StoreAddress(
        tracking_uri=f"sqlite:///{tmp_path}/m.db", work_uri=str(tmp_path / "work"), artifact_uri=str(tmp_path / "files")
    )


@pytest.mark.shared
@pytest.mark.slow
def test_M01_metrics_keep_their_values_and_their_names(shared, address):
    from mlflow.tracking import MlflowClient

    path = shared / "cases" / "files" / "M01-metric-names-refused" / "metrics.json"
    stored = store_metrics(path, address)
    expected = {"hits@1": 0.5, "hits_at_1": 0.9, "f1[macro]": 0.25, "exact_match,none": 0.75, "acc": 1.0}
    assert len(set(stored.names.values())) == 5
    logged = MlflowClient(address.tracking_uri).get_run(stored.run).data.metrics
    assert {name: logged[stored.names[name]] for name in expected} == expected
    assert stored_metrics(stored.run, address) == expected


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"": 1}', '{"a": NaN}', '{"a": "1"}', '{"a": true}', "[1]", "{}", "{"]
)
def test_M01_what_cannot_be_stored_is_refused_before_anything_is(tmp_path, address, text):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(InputError, match="json"):
        store_metrics(path, address)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.json"]


def test_M01_names_that_look_like_escapes_stay_apart(tmp_path, address):
    values = {"a@b": 1.0, "a_u40_b": 2.0, "a_b": 3.0, "A@b": 4.0, "x" * 300: 5.0, "x" * 299 + "y": 6.0}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(values))
    assert stored_metrics(store_metrics(path, address).run, address) == values
