"""Records that become artifacts name other artifacts by content, so that a crash changes no digest."""

from __future__ import annotations

import json

import pytest

from data_contracts.records import RECORDS, Ref


@pytest.mark.parametrize("name", RECORDS)
def test_no_record_that_is_an_artifact_holds_a_reference_to_the_run_that_made_something(name: str) -> None:
    schema = json.dumps(RECORDS[name].type.model_json_schema())
    assert Ref.__name__ not in json.loads(schema).get("$defs", {})
    assert '"run":' not in schema
