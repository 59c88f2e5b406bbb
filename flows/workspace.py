"""A configuration file and what follows from where it stands: the folder of relative paths and the store's address.

The embedded default keeps everything under one folder, `store.home`: SQLite MLflow, artifacts, work in progress, and
Prefect's own database. A `tracking_uri` or `work_uri` in the configuration moves those parts to a team's servers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_contracts.config import ArmConfig, Config
from data_contracts.config_file import load, parse
from data_contracts.errors import ConfigError
from data_contracts.records import Origin, Ref, Request, StoreAddress

CONFIG_FILE = "lazytrain.yaml"


@dataclass(frozen=True)
class Workspace:
    """A read configuration, its file, and the folder that relative paths in it start from."""

    config: Config
    file: Path
    given: str
    """The file as it was asked for: what another machine, where it lies at the same place, is asked for."""

    @classmethod
    def read(cls, file: Path | str) -> Workspace:
        """Read a configuration file. Raises `ConfigError` for a missing or invalid one."""
        path = Path(file).expanduser().resolve()
        return cls(load(path), path, str(file))

    def with_sections(self, sections: Mapping[str, Any]) -> Workspace:
        """Return this workspace with sections of its configuration replaced; None leaves one as it is."""
        given = {name: section for name, section in sections.items() if section is not None}
        return replace(self, config=self.config.model_copy(update=given))

    def recorded(self, values: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]] | None = None) -> Workspace:
        """Return this workspace with the configuration that a past run recorded, its store staying where it is.

        `others` are settings by section that are put over the recorded ones. Raises `ConfigError` for a configuration
        that this version does not take.
        """
        over = {name: {**values.get(name, {}), **part} for name, part in (others or {}).items()}
        values = {**values, **over, "store": self.config.store.model_dump(mode="json")}
        return replace(self, config=parse(values, "the configuration that the run recorded"))

    def check(self) -> Workspace:
        """Return this workspace; every stage is asked what it would refuse of its settings once its turn comes.

        Raises `ConfigError` or `MethodError` with the nearest valid name.
        """
        from stages.admission import parse_slice
        from stages.stage import VERBS, find_stage

        for verb in VERBS:
            parse_slice(find_stage(verb), self.config.slice(verb))
        for number, arm in enumerate(self.config.auto.arms):
            score = {**self.config.slice("score")["score"], "scorer": arm.scorer, "coverage": arm.coverage}
            select = {**self.config.slice("select"), "select": {"selector": arm.selector, "fraction": arm.fraction}}
            try:
                parse_slice(find_stage("score"), {"seed": self.config.seed, "score": score})
                parse_slice(find_stage("select"), select)
                if arm.selector.get("method") == "random" and self.config.select.noise is not None:
                    _require_no_scores(self.config.select.noise, arm.name)
                _require_price(arm)
            except ConfigError as error:
                where = f"auto.arms.{number}"
                words = [text.replace("`score.", f"`{where}.").replace("`select.", f"`{where}.") for text in error.args]
                raise ConfigError(*words) from error
        return self

    @property
    def root(self) -> Path:
        """The folder of the configuration file."""
        return self.file.parent

    @property
    def home(self) -> Path:
        """The folder of the embedded store."""
        return (self.root / self.config.store.home).resolve()

    @property
    def unused(self) -> bool:
        """Whether this is an embedded store in which nothing was run yet."""
        return self.config.store.tracking_uri is None and not (self.home / "mlflow.db").exists()

    @property
    def address(self) -> StoreAddress:
        """How a runner reaches the store; a local folder is made by the store on first use."""
        return embedded_address(
            self.home, tracking_uri=self.config.store.tracking_uri, work_uri=self.config.store.work_uri
        )

    def shown(self, path: Path) -> str:
        """Return a path as a person in the current folder would write it."""
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)

    def request(
        self, verb: str, inputs: Mapping[str, tuple[Ref, ...]], origin: Origin, *, refresh: bool = False
    ) -> Request:
        """Return what a runner needs to do a stage's work; an input that is an empty tuple was not given."""
        return Request(
            verb=verb,
            config=self.config.slice(verb),
            inputs={name: refs for name, refs in inputs.items() if refs},
            store=self.address,
            origin=origin,
            knobs={"root": str(self.root)},
            refresh=refresh,
        )

    @property
    def offline(self) -> bool:
        """Whether nothing in the configuration needs the network: every data source is a path that exists."""
        data = self.config.data
        sources = (*data.pool, *data.target, *data.validation, *data.holdout, *data.retention)
        return all((self.root / source).exists() or any(sign in source for sign in "*?[") for source in sources)


def embedded_address(home: Path, *, tracking_uri: str | None = None, work_uri: str | None = None) -> StoreAddress:
    """Return the address of a store under `home`, with its parts moved where a URI is given."""
    return StoreAddress(
        tracking_uri=tracking_uri or f"sqlite:///{home / 'mlflow.db'}",
        work_uri=work_uri or str(home / "work"),
        artifact_uri=None if tracking_uri else (home / "artifacts").as_uri(),
    )


def _require_no_scores(noise: Mapping[str, Any], arm: str) -> None:
    """Raise `ConfigError` where a noise filter reads scores, which an arm of chance does not have."""
    from data_contracts.method import resolve
    from stages.select.noise import NoiseFilter

    if resolve(NoiseFilter, noise, "select.noise").needs_scores:
        raise ConfigError(
            "a noise filter that every arm can use",
            f"{noise.get('method')} reads scores, and the arm {arm} has none",
            "use `answer_fit` or `trajectory`, or give the arm a scorer",
        )


def _require_price(arm: ArmConfig) -> None:
    """Raise `ConfigError` where an arm's scorer reads a model at no price: the whole pool would be scored to try it."""
    from data_contracts.method import find, name_in
    from stages.score.scorer import Scorer

    scorer = find(Scorer, name_in(arm.scorer, "score.scorer"))
    if arm.selector.get("method") != "random" and "model" in scorer.reads and not arm.passes:
        raise ConfigError(
            "`score.passes` is what scoring a row costs, in trainings on it; 0 is for arms that read text alone",
            f"it is 0, and {scorer.name()}, the scorer of {arm.name}, reads the model",
            "set it: 1 for a scorer of gradients, 0.34 for one of losses",
        )
