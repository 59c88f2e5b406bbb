"""The stage `train`: one segment on a selection, from the base or a checkpoint to a better checkpoint.

It promises exact resume, at least one step, a checkpoint chosen by validation loss among those that have not forgotten
more than is allowed, and one row of telemetry a step.
What to train on, how it fits and whether to go on are decided by other stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from data_contracts.arrow import TABLE_FILE
from data_contracts.config import GovernConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.errors import InputError
from data_contracts.method import Method, name_in, names
from data_contracts.records import Decision, Plan, Summary
from stages.model.pin import read_pin
from stages.stage import Artifact, Inputs, Stage, Takes, Work


class TrainSlice(Frozen):
    """What `train` reads of the configuration."""

    seed: int
    train: TrainConfig
    govern: GovernConfig


class Train(Stage[TrainSlice]):
    """Train a segment."""

    verb: ClassVar[str] = "train"
    config: ClassVar[type[Frozen]] = TrainSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base"),
        "plan": Takes("plan"),
        "tokens": Takes("tokens", many=True),
        "selection": Takes("selection"),
        "validation_tokens": Takes("tokens"),
        "target_tokens": Takes("tokens", optional=True),
        "retention_tokens": Takes("tokens", optional=True),
        "retention_reference": Takes("validation_losses", optional=True),  # of the run's start; else the segment's own
        "checkpoint": Takes("checkpoint", optional=True),
        "decision": Takes("decision", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {
        "checkpoint": "checkpoint",
        "end": "checkpoint",
        "curve": "curve",
        "validation_losses": "validation_losses",
        "retention_losses": "validation_losses",
        "example_losses": "example_losses",
        "example_influence": "example_influence",
        "example_choices": "example_choices",
    }
    optional: ClassVar[frozenset[str]] = frozenset({"end", "retention_losses", "example_influence", "example_choices"})

    def external(self, config: TrainSlice, root: Path) -> dict[str, Any]:
        """Return the slice without what decisions alone read of `govern` and plans of `train`: the same segment has the
        same identity."""
        return config.model_dump(
            mode="json", exclude={"govern": {"rounds", "evaluation_share", "hysteresis"}, "train": {"workers"}}
        )

    def methods(self, config: TrainSlice) -> Iterable[tuple[type[Method], str]]:
        """Name the policy and the batch selector, and every technique: the plan, an input, decides which is used."""
        from stages.governor.policy import Policy
        from stages.technique.batch_selector import BatchSelector

        picks = config.train.batch_selector
        selector = [] if picks is None else [(BatchSelector, name_in(picks, "train.batch_selector"))]
        return ((Policy, str(config.govern.policy.get("method"))), *selector, *techniques())

    def cause(self, config: TrainSlice) -> Literal["train", "probe"]:
        """Return what a segment is for."""
        return "probe" if config.train.probe else "train"

    def run(self, config: TrainSlice, inputs: Inputs, work: Work) -> Summary:
        """Train one segment; see the modules beside this one."""
        from data_contracts.direction import direction_of
        from stages.meter.machine import device_kind
        from stages.train.job import Job, Places
        from stages.train.order import check_rows, refuse_no_step

        plan, selection = inputs.one("plan").record(Plan), inputs.one("selection")
        visits = int(selection.table().column("repeats").to_numpy().sum())
        refuse_no_step(visits, plan, config.train)
        check_rows(inputs.one("validation_tokens").ref.rows)
        target = target_of(config.train, inputs)
        retention, reference = inputs.maybe("retention_tokens"), inputs.maybe("retention_reference")
        if config.govern.most_forgotten_nats is not None and retention is None:
            raise InputError(
                "a retention set where `govern.most_forgotten_nats` limits what is forgotten of it",
                "it was not given",
                "pass `retention_tokens`, or unset the limit",
            )
        given, checkpoint = inputs.maybe("decision"), inputs.maybe("checkpoint")
        decision = given.record(Decision) if given else None
        job = Job(
            folder=str(work.folder),
            places=Places(
                tokens=tuple(str(item.folder / TABLE_FILE) for item in inputs.all("tokens")),
                selection=str(selection.folder / TABLE_FILE),
                validation=str(inputs.one("validation_tokens").folder / TABLE_FILE),
                target=target,
                retention=place_of(retention),
                reference=place_of(reference) if retention else None,
                checkpoint=str(checkpoint.folder) if checkpoint else None,
            ),
            inputs={name: tuple(item.ref.digest for item in inputs.all(name)) for name in sorted(self.takes)},
            pin=read_pin(inputs.one("base")),
            plan=plan,
            train=config.train,
            cause=self.cause(config),
            policy=config.govern.policy,
            metric=config.govern.metric,
            direction=direction_of(config.govern.metric, config.govern.direction),
            most_forgotten=config.govern.most_forgotten_nats,
            evaluate_start=retention is not None and reference is None,
            anneals=decision is not None and decision.anneals,
            closes=decision is not None and decision.closes,
            segment_flops=least(decision.segment_flops if decision else None, config.train.segment_flops),
            **({"remaining": decision.remaining} if decision else {}),
            order_seed=work.seed("train", "order"),
            torch_seed=work.seed("train", "torch"),
        )
        from stages.train.publish import train_segment

        return train_segment(job, work, device=device_kind(), title="train")


def least(*limits: int | None) -> int | None:
    """Return the smallest limit; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def place_of(table: Artifact | None) -> str | None:
    """Return the file of a table that may not be given."""
    return str(table.folder / TABLE_FILE) if table else None


def target_of(train: TrainConfig, inputs: Inputs) -> str | None:
    """Return the target's table where influence, or a batch selector, reads it in training. Raises `InputError` where
    it is not given."""
    from stages.technique.batch_selector import batch_selector_of

    selector = batch_selector_of(train)
    picks = selector is not None and selector.reads_target
    if train.influence is None and not picks:
        return None
    given = inputs.maybe("target_tokens")
    if given is None or given.ref.rows == 0:
        raise InputError(
            f"a target with at least one row where `train.{'batch_selector' if picks else 'influence'}` reads it",
            "it has none" if given else "it was not given",
            f"pass `target_tokens`, or unset `train.{'batch_selector' if picks else 'influence'}`",
        )
    return str(given.folder / TABLE_FILE)


def techniques() -> tuple[tuple[type[Method], str], ...]:
    """Return every technique there is, importing none."""
    from stages.technique.base import Technique

    return tuple((Technique, name) for name in names(Technique))


STAGE = Train()
