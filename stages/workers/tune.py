"""Our policies for Ray Tune: a scheduler and a stopper that end trials as a policy would, with FLOPs as their time.

A trial's results are the evaluations of one run; after each the policy is asked whether to go on, as
`lazytrain govern` asks it. Policies that compare with `curves` are given those of the other trials so far. Ending is
all that is done here: pausing, sharing resources and searching are Tune's.

    tune.TuneConfig(metric="validation_loss", mode="min", scheduler=PolicyScheduler({"method": "gain_left"}))

The trainable reports the metric, `flops` since its start, and, where known, the metric's standard error as
`validation_se` (or METRIC_se).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from data_contracts.cost import Budget
from data_contracts.errors import ConfigError, InputError
from data_contracts.method import resolve
from stages.governor.policy import Choice, Policy
from stages.governor.records import RecordedCurve
from stages.governor.state import State
from stages.workers.cluster import settle

settle()

from ray.tune import Stopper  # noqa: E402 - it reads its settings here
from ray.tune.execution.tune_controller import TuneController  # noqa: E402
from ray.tune.experiment import Trial  # noqa: E402
from ray.tune.schedulers import FIFOScheduler, TrialScheduler  # noqa: E402

FLOPS = "flops"
OPEN = frozenset({"continue", "end"})
DIRECTIONS: Mapping[str, Literal["minimise", "maximise"]] = {"min": "minimise", "max": "maximise"}
SEEN = ("rows", "ended", "metric", "mode", "budget_flops")
"""Of `Trials`: what an experiment that goes on must know."""


class Trials:
    """The evaluations of all trials of an experiment, and what a policy says of each.

    Args:
        policy: its method mapping, `{method: asha, grace_flops: 10000000000}`.
        time_attr: the result's key for FLOPs since the trial's start; it only rises.
        metric, mode: the watched value and whether less ("min") or more ("max") of it is better.
        budget_flops: what a trial may spend; None is no limit.

    Raises `ConfigError` or `MethodError` for a policy that is none, and for a mode that is neither.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        time_attr: str = FLOPS,
        metric: str | None = None,
        mode: str | None = None,
        budget_flops: int | None = None,
    ) -> None:
        self.policy = resolve(Policy, policy, "policy")
        self.time_attr, self.metric, self.mode, self.budget_flops = time_attr, metric, mode, budget_flops
        if mode is not None and mode not in DIRECTIONS:
            raise ConfigError("`mode` is min or max", f"it is {mode!r}", "say which way the metric improves")
        self.compares = "curves" in type(self.policy).model_fields
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.ended = 0

    def choose(self, trial: str, result: Mapping[str, Any]) -> Choice | None:
        """Return what the policy says after a result of `trial`; None where the result holds no metric.

        A trial that went back to a checkpoint goes on from there: what it had reported beyond is forgotten. Raises
        `InputError` where a result holds the metric and no FLOPs.
        """
        if self.metric is None or self.mode is None:
            raise ConfigError("a metric and its mode", "they are not set", "set them here or in tune.TuneConfig")
        if result.get(self.metric) is None:
            return None
        if not math.isfinite(result.get(self.time_attr, math.nan)):
            raise InputError(
                f"every result with {self.metric} tells the FLOPs since the trial's start as {self.time_attr}",
                f"it holds {', '.join(sorted(result))}",
                f"tune.report({{{self.metric!r}: …, {self.time_attr!r}: …}}), or name another `time_attr`",
            )
        flops = int(result[self.time_attr])
        rows = [row for row in self.rows.get(trial, []) if row["flops"] < flops]
        error = "validation_se" if self.metric == "validation_loss" else f"{self.metric}_se"
        step = int(result.get("training_iteration", len(rows) + 1))
        noise = result.get(error)
        seen = {self.metric: float(result[self.metric]), error: None if noise is None else float(noise)}
        rows.append({"step": step, "flops": flops, **seen})
        self.rows[trial] = rows
        left = None if self.budget_flops is None else max(0, self.budget_flops - flops)
        state = State.from_rows([rows], metric=self.metric, direction=DIRECTIONS[self.mode], horizon=left)
        choice = self._rule(trial).decide(state, Budget(flops=left), OPEN)
        self.ended += choice.action == "end"
        return choice

    def _rule(self, trial: str) -> Policy:
        """Return the policy, with the other trials among its `curves` where it has such; as those grow, a rung of
        `asha` is judged when it is reached and not again."""
        if not self.compares:
            return self.policy
        others = []
        for name, rows in self.rows.items():
            finite = [row for row in rows if math.isfinite(row[str(self.metric)])]
            if name != trial and finite:
                flops, values = (tuple(row[key] for row in finite) for key in ("flops", str(self.metric)))
                others.append(RecordedCurve(flops=flops, values=values))
        given: tuple[RecordedCurve, ...] = self.policy.curves  # type: ignore[attr-defined]
        once = {"once": True} if "once" in type(self.policy).model_fields else {}
        return self.policy.model_copy(update={"curves": (*given, *others), **once})


class PolicyScheduler(FIFOScheduler):
    """A Ray Tune scheduler that ends a trial where the policy ends a run. The arguments are those of `Trials`; metric
    and mode may be left to `tune.TuneConfig`."""

    def __init__(
        self,
        policy: Mapping[str, Any],
        time_attr: str = FLOPS,
        metric: str | None = None,
        mode: str | None = None,
        budget_flops: int | None = None,
    ) -> None:
        super().__init__()
        self.trials = Trials(policy, time_attr, metric, mode, budget_flops)
        self._metric = metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Take metric and mode of `tune.TuneConfig`; False where one was set already."""
        known = self.trials
        if (known.metric and metric) or (known.mode and mode):
            return False
        known.metric, known.mode = metric or known.metric, mode or known.mode
        self._metric = known.metric
        return True

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        """Return STOP where the policy ends the run, else CONTINUE."""
        choice = self.trials.choose(trial.trial_id, result)
        return str(TrialScheduler.STOP if choice and choice.action == "end" else TrialScheduler.CONTINUE)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """Forget a trial that failed: it is no record for others; where it is tried again, it reports anew."""
        self.trials.rows.pop(trial.trial_id, None)

    def debug_string(self) -> str:
        """Return one line for Tune's table."""
        return f"{type(self.trials.policy).name()} over {self.trials.time_attr}: {self.trials.ended} ended"

    def save(self, checkpoint_path: str) -> None:
        """Write what was seen, as JSON."""
        seen = {name: getattr(self.trials, name) for name in SEEN}
        Path(checkpoint_path).write_text(json.dumps(seen), encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        """Read what `save` wrote; the policy is this scheduler's own."""
        seen = json.loads(Path(checkpoint_path).read_text(encoding="utf-8"))
        for name in SEEN:
            setattr(self.trials, name, seen[name])
        self._metric = self.trials.metric


class PolicyStopper(Stopper):
    """The same as a stopper, beside any scheduler of Tune's: `tune.RunConfig(stop=PolicyStopper(…))`."""

    def __init__(
        self,
        policy: Mapping[str, Any],
        metric: str,
        mode: str,
        time_attr: str = FLOPS,
        budget_flops: int | None = None,
    ) -> None:
        self.trials = Trials(policy, time_attr, metric, mode, budget_flops)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the policy ends the run after this result."""
        choice = self.trials.choose(trial_id, result)
        return choice is not None and choice.action == "end"

    def stop_all(self) -> bool:
        """Never: a policy judges one run."""
        return False
