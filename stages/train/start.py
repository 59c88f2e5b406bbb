"""Where a segment starts: the base or a checkpoint, made ready to train by the plan's technique.

Every rank builds the same model on its own: weights come from the same files, adapters' initial values from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_contracts.errors import ConfigError
from data_contracts.method import resolve
from stages.model.checkpoint import load_checkpoint, merge_adapters
from stages.model.load import load_model
from stages.technique.base import Technique, refuse_influence
from stages.technique.frozen import halve_frozen
from stages.technique.optimizer import Optimizer, named_moments
from stages.technique.recompute import recompute
from stages.train.job import Job
from stages.train.schedule import Schedule


@dataclass
class Start:
    """A model ready to train, its optimizer, and where in the run it stands."""

    model: nn.Module
    optimizer: Optimizer
    technique: dict[str, Any]
    schedule: Schedule
    run_step: int
    run_tokens: int
    validation: dict[str, Any] | None
    """The evaluation of the checkpoint started from: step, loss, se."""
    guard: dict[str, Any]
    """The guard's state at a segment's start; what it knew of the last one's losses is left out."""


def prepare(job: Job, device: str) -> Start:
    """Load and wrap the model of `job` and restore its optimizer.

    Raises `ConfigError` where the plan's technique cannot go on from the checkpoint's.
    """
    technique = resolve(Technique, job.plan.technique, "plan.technique")
    if job.train.influence:
        refuse_influence(technique)
    settings = {"method": type(technique).name(), **technique.model_dump(mode="json")}
    torch.manual_seed(job.torch_seed)
    place = "cpu" if technique.packs else device
    found, trainer = None, dict[str, Any]()
    model: Any
    if job.places.checkpoint is None:
        model = technique.wrap(load_model(job.pin, device=place))
    else:
        found = load_checkpoint(Path(job.places.checkpoint), job.pin, device=place)
        model, trainer = found.model, found.trainer
        same = trainer["technique"] == settings
        if not same:
            model = _other(model, trainer["technique"], settings)
        if not hasattr(model, "peft_config"):
            model = technique.wrap(model)
        found = found if same else None
    halve_frozen(model, job.plan.precision)
    model.to(device)
    recompute(model, job.plan.recomputed_blocks)
    peak = job.train.learning_rate or technique.learning_rate
    optimizer = technique.optimizer(model, job.train, peak, job.torch_seed, job.plan.optimizer_states)
    if found is not None:
        optimizer.restore(trainer["optimizer"], found.state | named_moments(found.moments))
    step = int(trainer.get("run_step", trainer.get("step", 0)))
    schedule = Schedule(peak, job.train.warmup_steps, job.train.decay)
    guard = trainer.get("guard", {}) if job.train.guard else {}
    tokens, validation = int(trainer.get("tokens", 0)), trainer.get("validation")
    return Start(model, optimizer, settings, schedule, step, tokens, validation, guard)


def _other(model: Any, before: dict[str, Any], now: dict[str, Any]) -> Any:
    """Return a plain model to wrap anew, where the new technique can store what the old one learnt."""
    if now["method"] == "full":
        return merge_adapters(model) if hasattr(model, "peft_config") else model
    raise ConfigError(
        "a segment goes on with its checkpoint's technique, or turns to `full`",
        f"the checkpoint was trained by {before}, the plan asks for {now}",
        "keep `plan.techniques`, or start a new run from the trained model",
    )
