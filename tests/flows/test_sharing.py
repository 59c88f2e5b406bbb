"""What a run asks of a pot in its unit, and the command that goes on with it; a real one: tests/flows/test_standing.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from data_contracts.config_file import parse
from data_contracts.cost import Cost, Price
from data_contracts.errors import ConfigError
from data_contracts.ledger import Ledger
from data_contracts.store import RunRow
from flows.command.share import app
from flows.sharing import Begun, claim_of, rounds_for, shares
from flows.workspace import Workspace
from stages.governor.state import State

VALUES: dict[str, Any] = {"model": {"path": "model"}, "data": {"pool": "p.jsonl", "target": "t.jsonl"}}
ROW = RunRow(run="a" * 32, name="one", status="FINISHED", started=0.0)


def begun(losses: list[float], rounds: int = 3, at: int = 2) -> Begun:
    """A run that trained 100 FLOPs an evaluation, an hour in all, and scored for another."""
    rows = [
        {"step": i, "flops": 100 * i, "validation_loss": loss, "validation_se": 0.01}
        for i, loss in enumerate(losses, 1)
    ]
    price = Price(hour=3.0, stages={"score": 30.0})
    charges = (
        ("score", "score", Cost(flops=50, seconds=3600)),
        ("train", "train", Cost(flops=100 * len(losses), seconds=3600)),
    )
    config = parse({**VALUES, "name": "one", "govern": {"rounds": rounds}, "budget": {"price": {"hour": 3.0}}})
    return Begun(ROW, config, State.from_rows([rows]), at, Ledger(charges=charges).priced(price))


def test_hours_are_at_the_rate_of_its_training_and_money_at_its_price() -> None:
    run = begun([2 + i**-0.5 for i in range(1, 9)])
    hours, money, flops = (claim_of("one", run, unit, 1.0, 9.0) for unit in ("hours", "money", "flops"))  # type: ignore[arg-type]
    assert (hours.rate, hours.kept) == pytest.approx((1 / 800, 2.0))
    assert (money.rate, money.kept) == pytest.approx((3 / 800, 33.0))
    assert (flops.rate, flops.kept, flops.trained) == (1.0, 850.0, 800.0)
    assert (flops.reserve, flops.most) == (0.05, 9.0)
    assert flops.curve is not None


def test_a_rising_run_gets_nothing_and_one_before_its_first_decision_an_equal_part() -> None:
    rises = claim_of("one", begun([3, 2.5, 2.2, 2.0, 2.3, 2.6, 3.0]), "flops", 1.0, 9.0)
    assert rises.most == 0
    assert "rises" in rises.why
    early = claim_of("one", Begun(ROW, begun([1.0]).config), "flops", 1.0, 9.0)
    assert (early.curve, early.most) == (None, 9.0)
    assert early.why == "it has not come to its first decision"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = []
    for name in ("one", "two"):
        made.append(tmp_path / f"{name}.yaml")
        made[-1].write_text(yaml.safe_dump({**VALUES, "name": name}))
    return made


def test_runs_that_have_not_begun_share_equally_up_to_their_most_and_the_rest_is_said_to_be_left(
    files: list[Path],
) -> None:
    told = CliRunner().invoke(app, [*map(str, files), "--hours", "4", "--most", "two=1.5"], env={"COLUMNS": "120"})
    assert told.exit_code == 0, told.output
    assert f"budget: {{seconds: 7200}} in {files[0]}" in told.output.replace("\n", "")
    assert f"budget: {{seconds: 5400}} in {files[1]}" in told.output.replace("\n", "")
    assert "0.5 of the pot are left" in told.output


def test_what_is_not_one_pot_and_names_that_are_none_are_refused(files: list[Path]) -> None:
    one, two = (Workspace.read(path) for path in files)
    for more in ([], ["--flops", "1", "--hours", "1"], ["--flops", "0"], ["--flops", "9", "--weight", "one=0"]):
        found = CliRunner().invoke(app, [*map(str, files), *more])
        assert isinstance(found.exception, ConfigError)
    with pytest.raises(ConfigError, match="it is three"):
        shares([one, two], 1.0, "flops", {"three": 2.0}, {})
    with pytest.raises(ConfigError, match="names of their own"):
        shares([one, one], 1.0, "flops", {}, {})
    with pytest.raises(ConfigError, match="one has none"):
        shares([one, two], 1.0, "money", {}, {})


def test_a_run_that_used_its_rounds_is_given_one_more(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    falls = [2 + i**-0.5 for i in range(1, 9)]
    run = begun(falls, rounds=1, at=1)
    monkeypatch.setattr("flows.sharing.newest", lambda workspace: run)
    (mine,) = shares([Workspace.read(files[0])], 1000.0, "flops", {}, {})
    assert mine.command == (
        f"lazytrain resume {'a' * 12} --config {files[0]} --set budget.flops=1850 --set govern.rounds=2"
    )
    assert mine.portion.flops == pytest.approx(0.95 * 1850 - 850)  # 907.5


def test_a_share_of_more_passes_than_a_segment_makes_is_given_a_round_for_each() -> None:
    run = begun([2 + i**-0.5 for i in range(1, 9)], rounds=3, at=2)
    assert rounds_for(run, 900.0) == 3
    passes = replace(run, pass_flops=200.0)
    assert [rounds_for(passes, flops) for flops in (10.0, 200.0, 900.0)] == [3, 3, 2 + 5]
    twice = passes.config.model_copy(update={"train": passes.config.train.model_copy(update={"epochs": 2.0})})
    assert rounds_for(replace(passes, config=twice), 900.0) == 2 + 3
