"""Settings of the subcommands on plain files: a small file of sections, and `--set section.key=value`.

A `--config` file may hold sections of the configuration, or what other trainers call them: a technique's name with its
hyper-parameters, or batch size, accumulation, epochs and learning rate at the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from data_contracts.config import Config
from data_contracts.errors import ConfigError
from data_contracts.method import nearest

MINIMAL: dict[str, Any] = {"name": "plain", "model": {"path": "."}, "data": {"pool": ["-"], "target": ["-"]}}
"""The sections that the schema needs and a subcommand without them does not read."""
TECHNIQUES = ("full", "lora")
TRAINERS = ("epochs", "learning_rate", "weight_decay", "drop_last", "warmup_steps")
BATCH, ACCUMULATION = "per_device_batch_size", "gradient_accumulation_steps"


def settings(options: Iterable[str] | None) -> dict[str, Any]:
    """Read `name=value` options, each value as YAML would. Raises `ConfigError` for one of another form."""
    found: dict[str, Any] = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise ConfigError("a setting as name=value", f"it is {option!r}", "write --set name=value")
        found[name.strip()] = yaml.safe_load(value)
    return found


def sections(file: Path | None) -> dict[str, Any]:
    """Read a YAML or JSON file of settings as sections. Raises `ConfigError` naming a key that it does not know."""
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is a readable YAML or JSON file", str(error), "check the file") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file} is a mapping", f"it is {type(values).__name__}", "see `lazytrain init --schema`")
    found: dict[str, Any] = {}
    batch = {name: values[name] for name in (BATCH, ACCUMULATION) if name in values}
    for name, value in values.items():
        if name in TECHNIQUES:
            found.setdefault("plan", {}).setdefault("techniques", []).append({"method": name, **(value or {})})
        elif name in TRAINERS:
            found.setdefault("train", {})[name] = value
        elif name in Config.model_fields:
            found[name] = value
        elif name not in batch:
            known = [*TECHNIQUES, *TRAINERS, BATCH, ACCUMULATION, *Config.model_fields]
            raise ConfigError(f"{file.name} holds known keys", f"{name!r} is none", nearest(str(name), known))
    if batch:
        size, accumulation = int(batch.get(BATCH, 1)), int(batch.get(ACCUMULATION, 1))
        found.setdefault("plan", {}).update(micro_batches=[size], window=size * accumulation)
    return found
