"""Where a segment starts: the base or a checkpoint, made ready to train by the plan's technique.

Every rank builds the same model on its own: weights come from the same files, adapters' initial values from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from data_contracts.errors import ConfigError
from data_contracts.method import resolve
from stages.meter.flops import FlopModel
from stages.model.checkpoint import load_checkpoint, merge_adapters
from stages.model.load import load_model
from stages.model.shards import ranks, shard
from stages.technique.base import Technique, refuse_influence
from stages.technique.batch_selector import refuse_batch_selector, refuse_savings
from stages.technique.fake import fake_model
from stages.technique.frozen import halve_frozen
from stages.technique.optimizer import Optimizer, named_moments
from stages.technique.recompute import blocks_of, recompute
from stages.train.beginning import Beginning
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
    visited: dict[str, int]
    """Visits of each selection's stream that the weights have behind them, by its digest."""
    validation: dict[str, Any] | None
    """The evaluation of the checkpoint started from: step, loss, se."""
    guard: dict[str, Any]
    """The guard's state at a segment's start; what it knew of the last one's losses is left out."""
    beginning: Beginning | None = None
    """Where this state lies on disk already."""


def prepare(job: Job, device: str) -> Start:
    """Load and wrap the model of `job` and restore its optimizer.

    Raises `ConfigError` where the plan's technique cannot go on from the checkpoint's.
    """
    technique = resolve(Technique, job.plan.technique, "plan.technique")
    if job.train.influence:
        refuse_influence(technique)
    if job.train.batch_selector:
        refuse_batch_selector(job.train, technique)
        refuse_savings(
            {
                "shard": job.plan.sharded,
                "offload_activations": job.plan.offload_activations,
                f"states_{job.plan.optimizer_states}": job.plan.optimizer_states != "float32",
            }
        )
    settings = {"method": type(technique).name(), **technique.model_dump(mode="json")}
    torch.manual_seed(job.torch_seed)
    if job.plan.sharded:
        _refuse_sharding(job, technique)
    place = "cpu" if technique.packs or job.plan.sharded else device
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
    if job.plan.sharded:
        shard(model, blocks_of(model), ranks(torch.device(device).type))
    else:
        model.to(device)
    recompute(model, job.plan.recomputed_blocks)
    peak = job.train.learning_rate or technique.learning_rate
    optimizer = technique.optimizer(model, job.train, peak, job.torch_seed, job.plan.optimizer_states)
    if job.plan.sharded:
        optimizer.priced_as(_passes(job, technique))
    beginning = None
    if found is not None and job.places.checkpoint is not None:
        optimizer.restore(trainer["optimizer"], found.state | named_moments(found.moments))
        if not (technique.packs or job.plan.sharded):
            beginning = Beginning.of(Path(job.places.checkpoint), optimizer)
    step = int(trainer.get("run_step", trainer.get("step", 0)))
    schedule = Schedule(peak, job.train.warmup_steps, job.train.decay)
    guard = trainer.get("guard", {}) if job.train.guard else {}
    tokens, validation = int(trainer.get("tokens", 0)), trainer.get("validation")
    visited = dict(trainer.get("visited", {}))
    return Start(model, optimizer, settings, schedule, step, tokens, visited, validation, guard, beginning)


def _refuse_sharding(job: Job, technique: Technique) -> None:
    """Raise `ConfigError` where a plan spreads over workers what cannot be."""
    apart = {
        "influence in training": job.train.influence,
        f"moments in {job.plan.optimizer_states}": job.plan.optimizer_states != "float32",
        "activations in main memory": job.plan.offload_activations,
        type(technique).name(): "shard" not in technique.savings,
        "one worker": job.plan.workers < 2,
    }
    if wrong := [name for name, found in apart.items() if found]:
        raise ConfigError(
            "weights, gradients and moments are spread over two workers or more, by `full` or `lora` in float32",
            f"the plan spreads them with {' and '.join(wrong)}",
            "plan again, or leave `shard` out of `plan.savings`",
        )


def _passes(job: Job, technique: Technique) -> FlopModel:
    """Return the operations of the whole model, from a fake one: no rank has it, and none may pass alone."""
    with torch.random.fork_rng(devices=[]):
        mode = FakeTensorMode()
        model = fake_model(
            job.pin, technique, job.plan.precision, device="cpu", mode=mode, recomputed=job.plan.recomputed_blocks
        )
        with mode:
            return FlopModel.trace(model, train=True)


def _other(model: Any, before: dict[str, Any], now: dict[str, Any]) -> Any:
    """Return a plain model to wrap anew, where the new technique can store what the old one learnt."""
    if now["method"] == "full":
        return merge_adapters(model) if hasattr(model, "peft_config") else model
    raise ConfigError(
        "a segment goes on with its checkpoint's technique, or turns to `full`",
        f"the checkpoint was trained by {before}, the plan asks for {now}",
        "keep `plan.techniques`, or start a new run from the trained model",
    )
