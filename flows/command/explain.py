"""`lazytrain plan --explain`: whether choosing pays, before anything is trained, and what the last race measured.

Before a race it is known what a choice costs, how much more than chance it must teach to end equal to it with that
price paid, and, where an arm reads text alone, how many of the rows it would take are of the target's kind. What a run
would do follows by the rules of a run, the warm-up and evaluations aside. After a race there is what its probes showed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rich.text import Text

from data_contracts.config import ARMS
from data_contracts.config_file import parse
from data_contracts.cost import Frozen
from data_contracts.records import Likeness, Origin, Plan, Ref, Result, Summary, Table
from data_contracts.store import Store
from flows.arms import Contest, contest, said
from flows.command.screen import console, rich_table, screen, show
from flows.race import likenesses
from flows.workspace import Workspace
from stages.governor.payback import expected_price, worth

R = TypeVar("R", bound=Frozen)
USES = (1, 3, 10)


def explain_arms(plan: Plan, workspace: Workspace, pool_rows: int, data: Mapping[str, tuple[Ref, ...]]) -> None:
    """Print the payback of the configured arms, or of those that have names; `data` are the splits, by name."""
    out, asked = console(), _with_arms(workspace)
    told = likenesses(Preview(asked), asked.config.auto.arms, plan, _budget(plan, asked), data)
    out.print(rich_table(prices_table(plan, workspace, pool_rows, told)))
    for name, likeness in told.items():
        out.print(Text(f"{name}, by words alone: {said(likeness)}"))
    out.print(
        Text(
            "x 1.10: a choice pays where training on it is worth more than training on the first arm's 1.1 times "
            "as long. Used by several runs, its price is shared."
        )
    )
    found = last_weighing(workspace)
    if found is None:
        out.print(Text(f"What each teaches is measured by a race: {to_race(len(workspace.config.auto.arms))}."))
        return
    out.print(Text(f"The last race of these arms, in run {found[0][:12]}:"))
    show(found[1])


class Preview:
    """Calls stages to explain, in this process and outside any run; what they give is committed as in a run."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self.config = workspace, workspace.config

    def call_for(self, arm: str, verb: str, settings: Mapping[str, Frozen], /, **inputs: tuple[Ref, ...]) -> Result:
        """Call a stage for one way of choosing."""
        from stages.runner import run

        request = self._workspace.with_sections(settings).request(verb, inputs, Origin(name=f"{verb}-{arm}"))
        return run(request, reporter=screen())

    def read(self, result: Result, output: str, kind: type[R]) -> R:
        """Read a record that a call gave."""
        return Store(self._workspace.address).record(result.refs[output], kind)

    def notice(self, text: str) -> None:
        """Print it."""
        console().print(Text(text))


def _with_arms(workspace: Workspace) -> Workspace:
    """Return the workspace with the arms that have names where it has none."""
    config = workspace.config
    if config.auto.arms:
        return workspace
    return workspace.with_sections({"auto": parse({**config.model_dump(), "auto": {"arms": tuple(ARMS)}}).auto})


def _budget(plan: Plan, workspace: Workspace) -> float:
    flops = workspace.config.budget.flops
    return float(flops if flops is not None else plan.pass_flops)


def to_race(arms: int) -> str:
    """Return what is still to be done for a race of so many configured arms to be shown."""
    if arms > 1:
        return "this store holds none of these arms yet"
    return "add another arm and run" if arms else "set `auto: {arms: […]}` and run"


def prices_table(plan: Plan, workspace: Workspace, pool_rows: int, told: Mapping[str, Likeness] | None = None) -> Table:
    """Return what each arm's choosing costs, alone and as a share of the budget, and what it must gain."""
    auto, budget = _with_arms(workspace).config.auto, _budget(plan, workspace)
    step = plan.micro_batch * plan.accumulation * plan.pass_flops / pool_rows
    held = contest(auto.arms, plan, budget, auto, auto.least_steps * step, told or {})
    rows = []
    for arm in auto.arms:
        price = expected_price(arm, plan)
        needs = [worth(price, budget, uses) for uses in USES]
        rows.append(
            (
                arm.name,
                price,
                f"{price / budget:.1%}",
                _standing(arm.name, held, auto.arms[0].name),
                *("never" if need is None else f"x {need:.2f}" for need in needs),
            )
        )
    whose = (
        "the budget"
        if workspace.config.budget.flops is not None
        else "one pass over the pool (no `budget.flops` is set)"
    )
    columns = ("arm", "choosing (FLOPs)", f"of {whose}", "in a race", *(f"pays at, {uses} use(s)" for uses in USES))
    return Table(title="What choosing must gain", columns=columns, rows=tuple(rows))


def _standing(name: str, held: Contest, first: str) -> str:
    used = held.arms[0].name
    if name in held.left_out:
        return f"left out: {held.left_out[name]}"
    if len(held.arms) > 1:
        return "the arm to beat" if name == used else "tried"
    if name == used:
        return "used untried"
    return f"no: {held.why}" if used == first else f"no: {used} is used"


def last_weighing(workspace: Workspace) -> tuple[str, Summary] | None:
    """Return (run, what it said) of the newest race of these arms in this store; None where there was none."""
    store, mine = Store(workspace.address), workspace.config.slice("weigh")["auto"]["arms"]
    for row in store.runs():
        for attempt in store.attempts(row.run):
            if attempt.stage == "weigh" and attempt.status == "FINISHED":
                manifest = store.read_manifest(attempt.run)
                if all(arm in mine for arm in manifest.config["auto"]["arms"]):
                    return row.run, manifest.summary
    return None
