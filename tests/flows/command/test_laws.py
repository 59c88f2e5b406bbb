"""`lazytrain laws` on tables: what it prints, what it leaves out and why. A run's own history: tests/flows/test_standing.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_contracts.errors import ConfigError, InputError
from flows.command.laws import app
from stages.governor.laws.chinchilla import Chinchilla


@pytest.fixture
def table(tmp_path: Path) -> str:
    law, rng = Chinchilla(), np.random.default_rng(0)
    runs = {"parameters": 10 ** rng.uniform(7, 9, 25), "tokens": 10 ** rng.uniform(8.5, 10.5, 25)}
    loss = law.predict(runs) * np.exp(0.003 * rng.standard_normal(25))
    lines = [f"{n:.6g},{d:.6g},{y:.6g}" for n, d, y in zip(*runs.values(), loss, strict=True)]
    (tmp_path / "runs.csv").write_text("\n".join(["parameters,tokens,loss", *lines]) + "\n")
    return str(tmp_path / "runs.csv")


def asked(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "160"})
    assert done.exit_code == 0
    return done.output


def test_a_table_is_told_by_every_law_that_its_columns_allow(table: str) -> None:
    told = json.loads(asked("--table", table, "--flops", "1e20", "--json"))
    assert [item["law"] for item in told["laws"]] == ["chinchilla", "kaplan"]
    assert "it reads parameters, tokens, unique and there is no unique" in told["left_out"]["muennighoff"]
    assert set(told["left_out"]) == {"compression", "muennighoff", "noisy_quadratic"}
    first = told["laws"][0]
    law = Chinchilla()
    truth = law.predict({name: [value] for name, value in zip(law.splits, law.optimal(1e20), strict=True)})[0]
    assert first["expected"]["low"] < truth < first["expected"]["high"]
    assert first["held_out"]["runs"] == 5
    assert {one["name"] for one in first["constants"]} == {"log_e", "log_a", "log_b", "alpha", "beta"}


def test_the_screen_shows_constants_errors_and_what_is_expected(table: str) -> None:
    shown = asked("--table", table, "--law", "chinchilla", "--flops", "1e20")
    for words in ("chinchilla, fitted to 25 runs", "alpha", "mean absolute error", "At 1e+20 FLOPs", "best split"):
        assert words in shown
    assert "left out" not in shown


def test_what_cannot_be_told_is_refused_with_the_reason(table: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--law hoffmann"):
        asked("--table", table, "--law", "hoffmann")
    with pytest.raises(ConfigError, match="both or none"):
        asked("--json")
    with pytest.raises(InputError, match="muennighoff: it reads"):
        asked("--table", table, "--law", "muennighoff")
    few = tmp_path / "few.csv"
    few.write_text("parameters,tokens,loss\n1e8,1e9,3\n1e9,1e10,2.5\n")
    with pytest.raises(InputError, match=r"few\.csv: chinchilla: it needs more runs than constants"):
        asked("--table", str(few), "--law", "chinchilla")
