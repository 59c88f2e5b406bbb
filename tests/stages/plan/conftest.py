"""What a plan is made from: a pinned model and token tables, as the stage is given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_contracts.config import ModelConfig
from data_contracts.records import ModelPin, Plan
from stages.model.load import pin_model
from stages.plan.stage import STAGE, PlanSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for

Columns = dict[str, list[Any]]


@pytest.fixture(scope="session")
def pin(shared: Path) -> ModelPin:
    """The pinned stories260k."""
    return pin_model(ModelConfig(path="data/stories260k"), shared)


def token_columns(rows: Sequence[tuple[list[int], list[bool]]]) -> Columns:
    """A `tokens` table of rows in order."""
    return {
        "example_id": [f"{number:032x}" for number in range(len(rows))],
        "source": ["a"] * len(rows),
        "input_ids": [ids for ids, _ in rows],
        "answer_mask": [mask for _, mask in rows],
        "n_tokens": [len(ids) for ids, _ in rows],
        "n_answer_tokens": [sum(mask) for _, mask in rows],
        "truncated": [False] * len(rows),
    }


def random_rows(*lengths: int) -> list[tuple[list[int], list[bool]]]:
    """Rows whose second half is the answer."""
    draw = np.random.default_rng(0)
    return [(draw.integers(3, 250, n).tolist(), [at >= n // 2 for at in range(n)]) for n in lengths]


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., dict[str, Artifact]]:
    """Make input artifacts: `given(pin, pool=columns, target=columns)`."""

    def make(pin: ModelPin, *, pool: Columns, target: Columns | None = None) -> dict[str, Artifact]:
        contracts = {"base": "base", "pool_tokens": "tokens", "target_tokens": "tokens"}
        work = LocalWork(tmp_path / "inputs", contracts)
        work.record("base", pin)
        work.table("pool_tokens", pool)
        if target is not None:
            work.table("target_tokens", target)
        return {name: work.artifact(name) for name in contracts if name in work.opened}

    return make


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., tuple[Plan, LocalWork, Any]]:
    """Run the stage: `planned(config sections, inputs)` gives the plan, the work and the summary."""
    made = 0

    def run(sections: dict[str, Any], inputs: dict[str, Any], **settings: Any) -> tuple[Plan, LocalWork, Any]:
        nonlocal made
        made += 1
        names = ("budget", "plan", "train")
        config = PlanSlice.model_validate({"seed": 0, **{name: sections.get(name, {}) for name in names}})
        work = work_for(STAGE, tmp_path / f"plan-{made}", **settings)
        summary = STAGE.run(config, inputs_of(**inputs), work)
        return work.artifact("plan").record(Plan), work, summary

    return run
