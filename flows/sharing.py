"""What each configuration's newest run asks of a common pot, read from its store, and how it goes on with its part.

Nothing is written. A run is continued as `lazytrain resume --set` continues it: from before its closing decay, with all
that it spent up to there counted once. How a pot is divided is `stages/governor/sharing.py`'s part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import Config
from data_contracts.config_file import parse
from data_contracts.cost import Cost
from data_contracts.errors import ConfigError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import Decision, Manifest
from data_contracts.store import AttemptRow, RunRow, Store
from flows.workspace import Workspace
from stages.governor.sharing import Claim, Curve, Portion, curve_of, divide, nothing
from stages.governor.state import State

Unit = Literal["flops", "hours", "money"]
STOCK: Mapping[Unit, str] = {"flops": "flops", "hours": "seconds", "money": "money"}
SECONDS = 3600.0


def amount(cost: Cost, unit: Unit) -> float:
    """Return the cost in the pot's unit."""
    return cost.seconds / SECONDS if unit == "hours" else float(getattr(cost, STOCK[unit]))


@dataclass(frozen=True)
class Begun:
    """A run of a configuration as it stands.

    Args:
        run: of the store; None where none was begun.
        config: that the run recorded, else the file's.
        state: of its training up to where it goes on; None before its first decision.
        round: of the decision that is made anew.
        kept: the ledger of all that it goes on with; with money where there is a price.
        spent: by all that it made or was given, failed attempts and a closing decay included.
        again: FLOPs of training that are made again: its closing decay.
        pass_flops: of a pass over the selection in force, evaluations included; None before the first selection.
    """

    run: RunRow | None
    config: Config
    state: State | None = None
    round: int = 0
    kept: Ledger = field(default_factory=Ledger)
    spent: Cost = field(default_factory=Cost)
    again: int = 0
    pass_flops: float | None = None

    @property
    def loss(self) -> float | None:
        """The best validation loss where it goes on."""
        best = self.state.best if self.state else None
        return self.state.shown(best.loss) if self.state and best else None

    def rate(self, unit: Unit) -> float | None:
        """Return what a FLOP of its training takes of the pot; None where none was timed."""
        if unit == "flops":
            return 1.0
        trained = self.kept.training()
        took = amount(trained, unit)
        return took / trained.flops if trained.flops and took > 0 else None

    def kept_of(self, unit: Unit) -> float:
        """Return what it goes on with has spent of the pot's stock."""
        return amount(self.kept.total, unit)


@dataclass(frozen=True)
class Share:
    """A run's part of the pot and how it goes on with it.

    Args:
        name: of its configuration.
        begun: the run.
        portion: what it gets.
        curve: that it was continued on; None where too little was seen.
        limit: the budget's stock, to be set to this: what it keeps and its part.
        command: that goes on with it; "" where it gets nothing.
    """

    name: str
    begun: Begun
    portion: Portion
    curve: Curve | None
    limit: float
    command: str


def shares(
    workspaces: Sequence[Workspace],
    pot: float,
    unit: Unit,
    weights: Mapping[str, float],
    most: Mapping[str, float],
) -> list[Share]:
    """Return the share of each configuration, in the order given.

    Args:
        workspaces: the configurations; each is known by its `name`.
        pot, unit: what there is to share, in FLOPs, hours or the price's currency.
        weights, most: by name: what a nat of its loss is worth, and the most it may get.

    Raises `ConfigError` for equal names, a name that is none of them, and money without one price's currency.
    """
    names = [workspace.config.name for workspace in workspaces]
    _check(names, weights, most)
    begun = [newest(workspace) for workspace in workspaces]
    if unit == "money":
        _one_currency(names, begun)
    claims = [
        claim_of(name, run, unit, weights.get(name, 1.0), most.get(name, float("inf")))
        for name, run in zip(names, begun, strict=True)
    ]
    portions = divide(claims, pot)
    found = []
    for workspace, run, claim, portion in zip(workspaces, begun, claims, portions, strict=True):
        limit = run.kept_of(unit) + portion.part
        command = _command(workspace, run, unit, limit, portion.flops) if portion.part > 0 else ""
        found.append(Share(claim.name, run, portion, claim.curve, limit, command))
    return found


def newest(workspace: Workspace) -> Begun:
    """Return the newest run of the whole pipeline under the configuration's name, as it stands."""
    if workspace.unused:
        return Begun(None, workspace.config)
    store = Store(workspace.address)
    for row in store.runs():
        if row.name != workspace.config.name:
            continue
        attempts = store.attempts(row.run)
        if any(item.stage == "begin" and item.refs for item in attempts):
            config = parse({**store.run_config(row.run), "store": workspace.config.store.model_dump(mode="json")})
            return _standing(store, row, attempts, config)
    return Begun(None, workspace.config)


def _standing(store: Store, row: RunRow, attempts: Sequence[AttemptRow], config: Config) -> Begun:
    price = config.budget.price
    each = {item.run: Entry(item.run, item.run, item.stage, item.costs) for item in attempts}
    spent = Ledger.fold(each.values()).priced(price).total
    decided = [
        (store.record(item.refs["decision"], Decision), store.read_manifest(item.run))
        for item in attempts
        if "decision" in item.refs
    ]
    if not decided:
        return Begun(row, config, spent=spent)
    decided.sort(key=lambda item: item[0].round)
    at, manifest = next((item for item in decided if item[0].stops or item[0].anneals), decided[-1])
    state, last = _state(store, manifest, config, at), _state(store, decided[-1][1], config, decided[-1][0])
    given = [ref for refs in manifest.inputs.values() for ref in refs]
    return Begun(
        row,
        config,
        state,
        at.round,
        store.ledger(given).priced(price),
        spent,
        again=last.flops - state.flops,
        pass_flops=_pass_flops(store, manifest) if at.round else None,
    )


def _pass_flops(store: Store, manifest: Manifest) -> float | None:
    curve = read_table(store.open(manifest.inputs["curve"][-1]) / TABLE_FILE)
    epoch, flops = (curve.column(name).to_numpy() for name in ("epoch", "flops"))
    passes = float(epoch[-1] - epoch[0])
    return float(flops[-1] - flops[0]) / passes if passes > 0 else None


def _state(store: Store, manifest: Manifest, config: Config, decision: Decision) -> State:
    curves = [read_table(store.open(ref) / TABLE_FILE) for ref in manifest.inputs["curve"]]
    actions = [str(decision.numbers.get(f"segment_{i}_action", "")) for i in range(len(curves))]
    return State.from_curves(
        curves,
        metric=config.govern.metric,
        direction=decision.direction,
        actions=actions,
        most_forgotten=config.govern.most_forgotten_nats,
    )


def claim_of(name: str, begun: Begun, unit: Unit, weight: float, most: float) -> Claim:
    """Return what a run asks of the pot."""
    if begun.run is None:
        return Claim(name, weight=weight, most=most, why="nothing was run yet")
    rate = begun.rate(unit)
    if begun.state is None or rate is None:
        return Claim(name, weight=weight, most=most, why="it has not come to its first decision")
    curve, why, ends = curve_of(begun.state)
    claim = Claim(
        name,
        trained=float(begun.state.flops),
        kept=begun.kept_of(unit),
        curve=curve,
        rate=rate,
        reserve=begun.config.govern.evaluation_share,
        weight=weight,
        most=most,
        why=why,
    )
    return nothing(claim, why) if ends else claim


def _command(workspace: Workspace, begun: Begun, unit: Unit, limit: float, flops: float | None) -> str:
    """Return the command that goes on with a run; where none was begun, the section that its configuration needs."""
    file = workspace.given
    stock = STOCK[unit]
    shown = f"{int(limit)}" if unit == "flops" else f"{limit * SECONDS if unit == 'hours' else limit:.6g}"
    if begun.run is None:
        return f"budget: {{{stock}: {shown}}} in {file}, then lazytrain run {file}"
    rounds = rounds_for(begun, flops or 0.0)
    more = f" --set govern.rounds={rounds}" if rounds > begun.config.govern.rounds else ""
    return f"lazytrain resume {begun.run.run[:12]} --config {file} --set budget.{stock}={shown}{more}"


def rounds_for(begun: Begun, flops: float) -> int:
    """Return the rounds with which a run can train with `flops` more: a segment makes `train.epochs` passes at most."""
    longest = begun.config.train.epochs * (begun.pass_flops or math.inf)
    return max(begun.config.govern.rounds, begun.round + max(1, math.ceil(flops / longest)))


def _check(names: Sequence[str], weights: Mapping[str, Any], most: Mapping[str, Any]) -> None:
    if len(set(names)) < len(names):
        raise ConfigError(
            "configurations whose runs have names of their own", f"they are {', '.join(names)}", "set `name` in each"
        )
    for option, given in (("--weight", weights), ("--most", most)):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(
                f"{option} NAME=NUMBER for one of {', '.join(names)}",
                f"it is {unknown[0]}",
                "write the `name` in the file",
            )


def _one_currency(names: Sequence[str], begun: Sequence[Begun]) -> None:
    found = {}
    for name, run in zip(names, begun, strict=True):
        if run.config.budget.price is None:
            raise ConfigError(
                "a price of an hour in every configuration", f"{name} has none", "set `budget.price: {hour: …}`"
            )
        found[name] = run.config.budget.price.currency
    if len(set(found.values())) > 1:
        raise ConfigError("one currency", f"{found}", "give prices in one, or share hours")
