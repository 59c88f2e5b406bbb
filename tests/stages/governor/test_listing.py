"""What a user reads about policies and laws names all of them."""

from __future__ import annotations

import re

import pytest

from data_contracts.config import GovernConfig
from data_contracts.method import Method, names
from flows.command.govern import app
from stages.governor.law import LossModel
from stages.governor.policy import Policy
from tests.conftest import ROOT


@pytest.mark.parametrize(("family", "heading"), [(Policy, "| policy |"), (LossModel, "| law |")])
def test_the_documentation_lists_every_policy_and_every_law(family: type[Method], heading: str) -> None:
    text = (ROOT / "docs" / "governor.md").read_text(encoding="utf-8")
    table = text[text.index(heading) : text.index("\n\n", text.index(heading))]
    listed = [re.findall(r"`(\w+)`", line.split("|")[1])[0] for line in table.splitlines()[2:]]
    assert sorted(listed) == names(family)


def test_the_command_and_the_configuration_list_every_policy() -> None:
    import typer

    options = typer.main.get_command(app).params
    told = next(option.help for option in options if option.name == "policy")
    schema = GovernConfig.model_fields["policy"].description
    for name in names(Policy):
        assert name in told
        assert name in schema
