"""What a stage is run with: its config slice and its inputs, checked before anything else happens.

A request is refused here, with the nearest name, before a lease is asked for or an attempt opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.method import describe, nearest
from data_contracts.records import Ref, Request, contract_of
from data_contracts.store import Store
from stages.stage import Artifact, Inputs, Stage, Takes


def parse_slice(stage: Stage[Any], values: Mapping[str, Any]) -> Any:
    """Return the stage's config built from `values`, its methods' settings checked.

    Raises `ConfigError` with the nearest name of an unknown key, and what `Stage.check` raises.
    """
    try:
        config = stage.config(**values)
    except ValidationError as error:
        raise ConfigError(
            f"the configuration of {stage.verb} keeps its schema",
            describe(error, stage.config, ""),
            f"it reads the sections {', '.join(stage.config.model_fields)}",
        ) from error
    stage.check(config)
    return config


def open_inputs(store: Store, stage: Stage[Any], request: Request) -> Inputs:
    """Return the verified inputs of `request`.

    Raises `ConfigError` for a name the stage does not take, `ArtifactError` for an input that is missing, of another
    contract or not what was committed.
    """
    for name in request.inputs:
        if name not in stage.takes:
            raise ConfigError(f"`{name}` is an input of {stage.verb}", "it is not", nearest(name, sorted(stage.takes)))
    verify = bool(request.knobs.get("verify"))
    return Inputs(
        {
            name: tuple(
                Artifact(ref, store.open(ref, verify=verify), partial(store.measured, ref))
                for ref in _admit(name, takes, request.inputs.get(name, ()))
            )
            for name, takes in stage.takes.items()
        }
    )


def _admit(name: str, takes: Takes, refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    if not refs and not takes.optional:
        raise ArtifactError(f"an input `{name}` ({takes.contract})", "it was not given", f"make {takes.contract} first")
    if len(refs) > 1 and not takes.many:
        raise ArtifactError(f"one input `{name}`", f"{len(refs)} were given", "pass one")
    for ref in refs:
        try:
            known = contract_of(ref.contract).name
        except KeyError:
            known = f"{ref.contract}, which this version does not know"
        if known != takes.contract:
            raise ArtifactError(
                f"the input `{name}` keeps the contract {takes.contract}", f"it is {known}", "pass the right artifact"
            )
    return refs


def earlier_commit(store: Store, stage: Stage[Any], kin: str) -> Inputs | None:
    """Return inputs and outputs of the newest commit with this kin whose payloads are whole, or None."""
    for manifest in store.kindred(stage.verb, kin) if kin else ():
        refs = {**manifest.inputs, **{name: (output.ref,) for name, output in manifest.outputs.items()}}
        refs = {name: given for name, given in refs.items() if stage.recalls is None or name in stage.recalls}
        try:
            return Inputs(
                {name: tuple(Artifact(ref, store.open(ref)) for ref in given) for name, given in refs.items()}
            )
        except ArtifactError:
            continue
    return None
