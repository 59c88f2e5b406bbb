"""Exported contracts are valid documents of the Open Data Contract Standard, and say what the code says."""

from __future__ import annotations

import json

import pytest
import yaml
from jsonschema import validators
from open_data_contract_standard.model import OpenDataContractStandard

from data_contracts.contract import Contract
from data_contracts.odcs import to_yaml
from data_contracts.records import CONTRACTS

SCHEMA = json.loads(OpenDataContractStandard.json_schema())


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_every_contract_exports_a_document_that_the_standard_accepts(name: str) -> None:
    document = yaml.safe_load(to_yaml(CONTRACTS[name]))
    errors = [
        f"{error.json_path}: {error.message}"
        for error in validators.validator_for(SCHEMA)(SCHEMA).iter_errors(document)
    ]
    assert errors == []
    assert document["id"] == f"lazytrain-{name}"
    assert OpenDataContractStandard.from_string(to_yaml(CONTRACTS[name])).name == name


def test_a_document_that_breaks_the_standard_is_noticed_by_the_same_check() -> None:
    document = {**yaml.safe_load(to_yaml(CONTRACTS["scores"])), "kind": "Nonsense"}
    assert list(validators.validator_for(SCHEMA)(SCHEMA).iter_errors(document))


@pytest.mark.parametrize("name", sorted(name for name, contract in CONTRACTS.items() if isinstance(contract, Contract)))
def test_columns_nullability_and_keys_survive_the_export(name: str) -> None:
    contract = CONTRACTS[name]
    assert isinstance(contract, Contract)
    columns = yaml.safe_load(to_yaml(contract))["schema"][0]["properties"]
    assert [column["name"] for column in columns] == contract.whole.names
    assert [not column["required"] for column in columns] == [field.nullable for field in contract.whole]
    keyed = sorted((column["primaryKeyPosition"], column["name"]) for column in columns if column.get("primaryKey"))
    assert tuple(column for _, column in keyed) == contract.key


def test_bounds_and_choices_are_stated_as_numbers_and_lists() -> None:
    contaminated = {
        c["name"]: c for c in yaml.safe_load(to_yaml(CONTRACTS["contamination"]))["schema"][0]["properties"]
    }
    assert contaminated["overlap"]["logicalTypeOptions"] == {"minimum": 0, "maximum": 1}
    rule = contaminated["kind"]["quality"][0]
    assert rule["arguments"]["validValues"] == ["exact", "ngram", "normalised", "prompt"]
    assert rule["mustBe"] == 0
