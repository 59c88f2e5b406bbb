"""Which methods are supported is what the documentation says in bold."""

from __future__ import annotations

import re

import pytest

from data_contracts.method import Method, find, names
from stages.score.scorer import Scorer
from stages.select.selector import Selector
from tests.conftest import ROOT


@pytest.mark.parametrize(("family", "page"), [(Scorer, "scoring"), (Selector, "selection")])
def test_the_documentation_lists_every_method_and_marks_the_supported_ones(family: type[Method], page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    table = text[text.index("| reads |") : text.index("\n\n", text.index("| reads |"))]
    first = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    bold = {name for cell in first for name in re.findall(r"\*\*`(\w+)`\*\*", cell)}
    ours = {name for name in names(family) if find(family, name).__module__.startswith("stages.")}
    assert listed == ours
    assert bold == {name for name in ours if find(family, name).supported}
