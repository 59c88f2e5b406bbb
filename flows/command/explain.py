"""`lazytrain plan --explain`: whether choosing pays: prices before anything was tried, and what the last race measured.

Before a race nothing is known of what a choice teaches; what is known is how much more than chance it must teach to end
equal to it once its price is taken from the budget. After one, the numbers are those that its probes showed.
"""

from __future__ import annotations

from rich.text import Text

from data_contracts.config import ARMS
from data_contracts.config_file import parse
from data_contracts.records import Plan, Summary, Table
from data_contracts.store import Store
from flows.command.screen import console, rich_table, show
from flows.race import chooses, contenders, expected_price, left_out, probe_flops
from flows.workspace import Workspace
from stages.governor.payback import worth

USES = (1, 3, 10)


def explain_arms(plan: Plan, workspace: Workspace, pool_rows: int) -> None:
    """Print the payback of the configured arms, or of those that have names."""
    out = console()
    out.print(rich_table(prices_table(plan, workspace, pool_rows)))
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


def to_race(arms: int) -> str:
    """Return what is still to be done for a race of so many configured arms to be shown."""
    if arms > 1:
        return "this store holds none of these arms yet"
    return "add another arm and run" if arms else "set `auto: {arms: […]}` and run"


def prices_table(plan: Plan, workspace: Workspace, pool_rows: int) -> Table:
    """Return what each arm's choosing costs, alone and as a share of the budget, and what it must gain."""
    auto = workspace.config.auto
    arms = auto.arms or parse({**workspace.config.model_dump(), "auto": {"arms": tuple(ARMS)}}).auto.arms
    flops = workspace.config.budget.flops
    budget = float(flops if flops is not None else plan.pass_flops)
    step = plan.micro_batch * plan.accumulation * plan.pass_flops / pool_rows
    why_not = ""
    standing = contenders(arms, plan, budget, auto)
    if not probe_flops(len(standing), budget, auto, auto.least_steps * step):
        why_not = f"no: probes of {auto.least_steps} steps take more than {auto.most_probes:.0%}"
    elif not chooses(standing, plan, budget):
        why_not = "no: nothing would be left out of the pool"
    rows = []
    for number, arm in enumerate(arms):
        price = expected_price(arm, plan)
        needs = [worth(price, budget, uses) for uses in USES]
        rows.append(
            (
                arm.name,
                price,
                f"{price / budget:.1%}",
                _standing(number, len(arms), left_out(arm, plan, budget, auto), why_not),
                *("never" if need is None else f"x {need:.2f}" for need in needs),
            )
        )
    whose = "the budget" if flops is not None else "one pass over the pool (no budget is set)"
    columns = ("arm", "choosing (FLOPs)", f"of {whose}", "in a race", *(f"pays at, {uses} use(s)" for uses in USES))
    return Table(title="What choosing must gain", columns=columns, rows=tuple(rows))


def _standing(number: int, count: int, why_left_out: str, why_not: str) -> str:
    if count == 1:
        return "used untried"
    if number == 0:
        return "the arm to beat"
    return f"left out: {why_left_out}" if why_left_out else why_not or "tried"


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
