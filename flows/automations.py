"""What a team's Prefect server watches by itself: runs that fell silent, and runs that were claimed and never started.

A self-hosted server marks no run as crashed when the machine under it dies; these two automations do. Neither forces a
state: a run that has ended stays as it ended, however late a last sign of life arrives. Runs of this host are found
sooner, by `reconcile`.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.automations import AutomationCore
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

TAG = "lazytrain"
HEARTBEAT_SECONDS = 60
"""How often a run of ours says that it is alive; the deployments set it for their processes."""
SILENT_SECONDS = 5 * HEARTBEAT_SECONDS
"""Fewer than three beats make false alarms when a server is slow."""
START_SECONDS = 900
"""From being claimed by a worker to running: time to pull an image of some gigabytes."""
BEAT = "prefect.flow-run.heartbeat"
ANY = "prefect.flow-run.*"
BEGUN = ("Running", "Retrying", "Completed", "Cached", "Failed", "Crashed", "Cancelling", "Cancelled", "Suspended",
         "Paused", "Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot")  # fmt: skip


def automations(silent_seconds: int = SILENT_SECONDS, start_seconds: int = START_SECONDS) -> list[AutomationCore]:
    """Return the automations; 10 s is the shortest time that Prefect takes."""
    return [
        _crash(
            "lazytrain: a silent run has crashed",
            {BEAT},
            {ANY},
            silent_seconds,
            f"No sign of life for {silent_seconds} s: its process or machine is gone. Run it again: it goes on from "
            "what was committed.",
        ),
        _crash(
            "lazytrain: a run that never starts has crashed",
            {"prefect.flow-run.Pending"},
            {f"prefect.flow-run.{name}" for name in BEGUN},
            start_seconds,
            f"A worker claimed it and did not start it within {start_seconds} s. Its place under the concurrency limit "
            "is free again.",
        ),
    ]


def _crash(name: str, after: set[str], expect: set[str], seconds: int, message: str) -> AutomationCore:
    return AutomationCore(
        name=name,
        description=message,
        tags=[TAG],
        trigger=EventTrigger(
            after=after,
            expect=expect,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": ["tag"], "prefect.resource.id": [f"prefect.tag.{TAG}"]}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


def install(silent_seconds: int = SILENT_SECONDS, start_seconds: int = START_SECONDS) -> list[str]:
    """Create the automations on the server, or bring those that are there up to date; return their names."""
    with get_client(sync_client=True) as client:
        wanted = automations(silent_seconds, start_seconds)
        for automation in wanted:
            there = client.read_automations_by_name(automation.name)
            if there:
                client.update_automation(there[0].id, automation)
            else:
                client.create_automation(automation)
    return [automation.name for automation in wanted]
