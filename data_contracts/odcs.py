"""Contracts for everyone else: any contract as Open Data Contract Standard (v3.1) YAML.

Promises a document that the standard's own schema accepts and that states every rule: types, nullability, key, bounds,
and as a text rule what the standard has no metric for. Nothing reads it back: the contracts in code are the source.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from open_data_contract_standard.model import (
    CustomProperty,
    DataQuality,
    Description,
    OpenDataContractStandard,
    SchemaObject,
    SchemaProperty,
)

from data_contracts.contract import (
    AnyContract,
    Contract,
    FolderContract,
    Invariant,
    NotEmpty,
    OneOf,
    RecordContract,
    Within,
)

API_VERSION = "v3.1.0"
_JSON_TYPES = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "array": "array",
    "object": "object",
}


def to_yaml(contract: AnyContract) -> str:
    """Return `contract` as one ODCS document."""
    return str(to_odcs(contract).to_yaml())


def to_odcs(contract: AnyContract) -> OpenDataContractStandard:
    """Return `contract` as the standard's model."""
    if isinstance(contract, Contract):
        described = _table(contract)
    elif isinstance(contract, RecordContract):
        described = _record(contract)
    else:
        described = _folder(contract)
    return OpenDataContractStandard(
        kind="DataContract",
        apiVersion=API_VERSION,
        id=f"lazytrain-{contract.name}",
        name=contract.name,
        version=str(contract.version),
        status="active",
        description=Description(purpose=contract.about or None),
        schema=[described],
    )


def _table(contract: Contract) -> SchemaObject:
    rules = [
        DataQuality(type="library", metric="rowCount", mustBeGreaterOrEqualTo=contract.least_rows, unit="rows"),
    ]
    if contract.key:
        rules.append(
            DataQuality(
                type="library", metric="duplicateValues", mustBe=0, arguments={"properties": list(contract.key)}
            )
        )
        rules.append(DataQuality(type="text", description=f"Rows are sorted by {', '.join(contract.key)}."))
    return SchemaObject(
        name=contract.name,
        logicalType="object",
        physicalType="Arrow IPC stream",
        description=contract.about or None,
        properties=[_column(contract, field) for field in contract.whole],
        quality=rules,
    )


def _column(contract: Contract, field: pa.Field) -> SchemaProperty:
    own = [invariant for invariant in contract.invariants if invariant.column == field.name]
    options: dict[str, Any] = {}
    for invariant in own:
        if isinstance(invariant, Within) and not pa.types.is_list(field.type):
            bounds = {"minimum": invariant.low, "maximum": invariant.high}
            options.update({name: bound for name, bound in bounds.items() if bound is not None})
    return SchemaProperty(
        name=field.name,
        logicalType=_logical(field.type),
        physicalType=str(field.type),
        required=not field.nullable,
        primaryKey=True if field.name in contract.key else None,
        primaryKeyPosition=contract.key.index(field.name) + 1 if field.name in contract.key else None,
        logicalTypeOptions=options or None,
        items=_item(field.type) if pa.types.is_list(field.type) else None,
        quality=[_rule(invariant) for invariant in own if not isinstance(invariant, Within)] or None,
    )


def _item(kind: pa.ListType) -> SchemaProperty:
    value = kind.value_field
    return SchemaProperty(
        name=value.name, logicalType=_logical(value.type), physicalType=str(value.type), required=not value.nullable
    )


def _rule(invariant: Invariant) -> DataQuality:
    if isinstance(invariant, OneOf):
        return DataQuality(
            type="library", metric="invalidValues", mustBe=0, arguments={"validValues": list(invariant.values)}
        )
    if isinstance(invariant, NotEmpty):
        return DataQuality(
            type="library", metric="missingValues", mustBe=0, arguments={"missingValues": [None, ""]}, unit="rows"
        )
    return DataQuality(type="text", description=f"{invariant.column}: {invariant.rule}.")


def _logical(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return "array"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    return "number" if pa.types.is_floating(kind) else "string"


def _record(contract: RecordContract) -> SchemaObject:
    schema = contract.type.model_json_schema()
    required = set(schema.get("required", ()))
    return SchemaObject(
        name=contract.name,
        logicalType="object",
        physicalType="JSON",
        description=contract.about or None,
        properties=[
            SchemaProperty(
                name=name,
                logicalType=_json_type(value, schema),
                physicalType="JSON",
                required=name in required,
                description=value.get("description"),
            )
            for name, value in schema["properties"].items()
        ],
    )


def _json_type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the standard's type of one JSON Schema property; the first that is not null of several."""
    if "$ref" in value:
        return _json_type(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    for option in value.get("anyOf", ()):
        if option.get("type") != "null":
            return _json_type(option, schema)
    return _JSON_TYPES[value.get("type", "object")]


def _folder(contract: FolderContract) -> SchemaObject:
    return SchemaObject(
        name=contract.name,
        logicalType="object",
        physicalType="folder",
        description=contract.about or None,
        properties=[
            SchemaProperty(name=name, logicalType="string", physicalType="file", required=True)
            for name in contract.needs
        ],
        quality=[DataQuality(type="text", description="No file is empty; none ends in a suffix that is not listed.")],
        customProperties=[CustomProperty(property="allowedSuffixes", value=list(contract.suffixes))],
    )
