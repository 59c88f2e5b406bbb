"""One YAML file in, a typed configuration or a refusal that names the key; never anything else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validators

from data_contracts.config import SLICES, Config
from data_contracts.config_file import json_schema, load, parse
from data_contracts.errors import ConfigError

LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"pool": ["a"], "target": ["b"]}}


def test_the_least_configuration_is_complete_and_survives_its_own_dump(tmp_path: Path) -> None:
    config = parse(LEAST)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(tmp_path / "c.yaml") == config


def test_every_field_is_read_by_a_stage_or_is_of_the_run_alone() -> None:
    read = {name for sections in SLICES.values() for name in sections}
    assert set(Config.model_fields) - read == {"name", "store"}
    assert read <= set(Config.model_fields)


@pytest.mark.parametrize("verb", sorted(SLICES))
def test_a_slice_is_plain_json_data(verb: str) -> None:
    piece = parse(LEAST).slice(verb)
    assert json.loads(json.dumps(piece, allow_nan=False)) == piece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, "did you mean 'model'"),
        ({"train": {"learing_rate": 1}}, "did you mean 'learning_rate'"),
        ({"budget": {"flop": 1}}, "did you mean 'flops'"),
        ({"model": {}}, "exactly one of `path` and `hub`"),
        ({"model": {"path": "a", "hub": "b"}}, "exactly one of `path` and `hub`"),
        ({"data": {"pool": [], "target": ["x"]}}, "data.pool"),
        ({"data": {"pool": ["x"]}}, "`data.target` is missing"),
        ({"select": {"fraction": 0.1, "count": 3}}, "give one of"),
        ({"select": {"fraction": 0}}, "select.fraction"),
        ({"budget": {"seconds": float("nan")}}, "budget.seconds"),
        ({"budget": {"peak_bytes": "3 parsecs"}}, "units"),
        ({"budget": {"peak_bytes": True}}, "budget.peak_bytes"),
        ({"budget": {"money": 5}}, "no work has a price"),
        ({"budget": {"money": 5, "price": {"hour": 0}}}, "no work has a price"),
        ({"budget": {"price": {"hour": 1, "stages": {"trian": 2}}}}, "'trian', which is no stage"),
        ({"budget": {"price": {"hour": -1}}}, "budget.price.hour"),
        ({"budget": {"price": {"hour": 1, "stages": {"train": -2}}}}, "budget.price.stages"),
        ({"budget": {"price": {"hour": 1e300}}}, "budget.price.hour"),
        ({"budget": {"price": {"hour": True}}}, "budget.price.hour"),
        ({"budget": {"money": True, "price": {"hour": 1}}}, "budget.money"),
        ({"budget": {"flops": 10**400}}, "budget.flops"),
        ({"budget": {"tokens": "1k"}}, "a number without a unit"),
        ({"plan": {"micro_batches": [4, 0]}}, "plan.micro_batches"),
        ({"plan": {"micro_batches": [-1]}}, "plan.micro_batches"),
        ({"name": "../up"}, "name"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_mistake_is_named_with_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**LEAST, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096), (4096, 4096), ("7e9 b", 7 * 10**9)],
)
def test_amounts_of_memory_are_read_with_their_units(text: Any, expected: int) -> None:
    assert parse({**LEAST, "budget": {"peak_bytes": text}}).budget.peak_bytes == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2\n",
        "model: {path: a, path: b}\n",
        "3: x\n",
        "[1, 2]\n",
        "",
        "a: [",
        "d: 2001-13-45\n",
        "a: !!python/object/apply:os.system [ls]\n",
        "[" * 5000,
        "a: &a [*a]\n",
        "\x00",
    ],
)
def test_yaml_that_is_no_configuration_is_refused_not_crashed_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "c.yaml")


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "c.yaml"):
        with pytest.raises(ConfigError):
            load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["method", "path"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(Config.model_fields)), JSON, max_size=4))
def test_whatever_stands_under_a_known_key_gives_a_configuration_or_a_refusal(values: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert parse({**LEAST, **values}).model.path or "model" in values


def test_the_json_schema_accepts_the_defaults_and_refuses_an_unknown_key() -> None:
    schema = json_schema()
    check = validators.validator_for(schema)(schema)
    assert list(check.iter_errors(LEAST)) == []
    assert list(check.iter_errors({**LEAST, "modle": 1}))


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(tmp_path, number):
    path = tmp_path / "lazytrain.yaml"
    path.write_text(
        "model: {path: m}\ndata: {pool: p, target: t}\n"
        f"select: {{selector: {{method: top_k}}, noise: {{method: loss, drop: {number}}}}}\n"
    )
    with pytest.raises(ConfigError, match="no finite number"):
        load(path)
