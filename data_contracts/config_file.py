"""Reading a configuration: one YAML file, or plain data, to a `Config`; and the schema that an editor reads.

Nothing in a file can run code or unfold without bound, no key stands twice, and an unknown one is refused with the
nearest valid name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from data_contracts.config import Config
from data_contracts.errors import ConfigError
from data_contracts.method import describe


def parse(values: Any, where: str = "the configuration") -> Config:
    """Build a `Config` from plain data. Raises `ConfigError` naming each unknown, missing or ill-typed key."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a mapping of sections", f"it is {type(values).__name__}", "see `lazytrain init`")
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigError(
            f"{where} keeps the schema", describe(error, Config, ""), "see `lazytrain init --schema` for every key"
        ) from error
    except TypeError as error:  # a key that is not text
        raise ConfigError(f"{where} has text keys", str(error), "quote the key") from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice: the second would silently win."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


LARGEST_FILE_BYTES, MOST_VALUES = 1 << 20, 100_000


def _bounded(values: Any) -> Any:
    """Return `values` unless YAML's aliases unfold to more than `MOST_VALUES` (nine lines can hold a billion).

    A number that is not finite is refused: JSON would make it nothing at all.
    """
    count, waiting = 0, [values]
    while waiting:
        item = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"it unfolds to more than {MOST_VALUES} values")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is no finite number: leave the key out where nothing is meant")
        waiting.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
    return values


def load(path: Path) -> Config:
    """Read one YAML file. Raises `ConfigError` for a missing, unreadable, too large or invalid one."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
        values = _bounded(yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys))  # noqa: S506 - a SafeLoader
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: bad UTF-8, the date 2001-13-01
        raise ConfigError(f"{path} is a readable YAML file", str(error), "see `lazytrain init`") from error
    return parse(values, str(path))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
