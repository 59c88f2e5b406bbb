"""Run stages one after another through the runner, without Prefect: how a benchmark crosses arms that share work.

Every call goes through the store, so arms that ask for the same work share one commit; costs are the manifests'.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from data_contracts.config import Config
from data_contracts.config_file import parse
from data_contracts.cost import Cost
from data_contracts.records import Ref, Request, Result, StoreAddress
from data_contracts.store import Store
from stages.runner import run

log = logging.getLogger(__name__)


class Chain:
    """Stages of one configuration on one embedded store under `folder`."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.values = config
        self.address = StoreAddress(
            tracking_uri=f"sqlite:///{folder}/mlflow.db",
            work_uri=str(folder / "work"),
            experiment=str(config.get("name", "benchmark")),
            artifact_uri=(folder / "artifacts").as_uri(),
        )
        self.store = Store(self.address)

    def config(self, **sections: dict[str, Any]) -> Config:
        """Return the configuration with some sections' keys replaced."""
        return parse(
            {**self.values, **{name: {**self.values.get(name, {}), **part} for name, part in sections.items()}}
        )

    def call(self, verb: str, config: Config, **inputs: tuple[Ref, ...]) -> Result:
        """Do (or adopt) one stage's work."""
        return run(
            Request(
                verb=verb,
                config=config.slice(verb),
                inputs={name: refs for name, refs in inputs.items() if refs},
                store=self.address,
                knobs={"root": str(self.folder)},
            )
        )


def total(*results: Result) -> Cost:
    """Return the cost of some stages' work, each once, as their manifests state it."""
    cost, seen = Cost(), set()
    for result in results:
        if result.identity not in seen:
            seen.add(result.identity)
            for part in result.costs.values():
                cost += part
    return cost


def report(benchmark: str, figures: dict[str, Any]) -> None:
    """Print the closing line of a benchmark: one line of JSON."""
    print(json.dumps({"benchmark": benchmark, "figures": figures}, default=str), flush=True)
