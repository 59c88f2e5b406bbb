"""Methods are found by name without importing the others; an installed wheel brings its own; mistakes name the nearest."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError, MethodError
from data_contracts.method import Method, find, module_of, names, nearest, resolve
from tests.conftest import ROOT

OWN = """
from typing import ClassVar
from pydantic import Field
from data_contracts.method import Method

class Tool(Method):
    family: ClassVar[str] = "tools"
    home: ClassVar[str] = "toolbox.methods"
"""
HAMMER = """
from pydantic import Field
from toolbox import Tool

class Hammer(Tool):
    weight: float = Field(1.0, gt=0, description="Kilograms.")
"""


@pytest.fixture
def toolbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """A family with three methods: a good one, one that cannot be imported, one that defines two classes."""
    home = tmp_path / "toolbox" / "methods"
    home.mkdir(parents=True)
    (home.parent / "__init__.py").write_text(OWN)
    (home / "__init__.py").write_text("")
    (home / "hammer.py").write_text(HAMMER)
    (home / "broken.py").write_text("raise RuntimeError('imported')\n")
    (home / "double.py").write_text("from toolbox import Tool\nclass A(Tool): ...\nclass B(Tool): ...\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toolbox"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    from toolbox import Tool  # type: ignore[import-not-found]

    return Tool  # type: ignore[no-any-return]


def test_names_and_modules_are_told_without_importing_any(toolbox: type[Method]) -> None:
    assert names(toolbox) == ["broken", "double", "hammer"]
    assert module_of(toolbox, "hammer") == "toolbox.methods.hammer"
    assert "toolbox.methods.hammer" not in sys.modules


def test_finding_one_imports_only_that_one(toolbox: type[Method]) -> None:
    found = find(toolbox, "hammer")
    assert (found.__name__, found.name()) == ("Hammer", "hammer")
    assert "toolbox.methods.broken" not in sys.modules
    with pytest.raises(RuntimeError, match="imported"):
        find(toolbox, "broken")


def test_a_module_with_two_methods_is_refused(toolbox: type[Method]) -> None:
    with pytest.raises(MethodError, match="defines 2"):
        find(toolbox, "double")


def test_an_unknown_method_names_the_nearest_and_imports_nothing(toolbox: type[Method]) -> None:
    for ask in (find, module_of):
        with pytest.raises(MethodError, match="did you mean 'hammer'"):
            ask(toolbox, "hamer")
    assert "toolbox.methods.broken" not in sys.modules
    assert nearest("xyz", ["hammer"]) == "known: hammer"
    assert nearest("xyz", []) == "there is nothing to set"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "name of a method"),
        ({"method": 3}, "name of a method"),
        ({"method": "hammer", "wieght": 2}, "did you mean 'weight'"),
        ({"method": "hammer", "weight": -1}, "greater than 0"),
        ({"method": "hammer", "weight": float("nan")}, "finite"),
        ({"method": "hammer", "weight": "heavy"}, "valid number"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_their_place(
    toolbox: type[Method], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(toolbox, settings, "shed")


def test_settings_become_a_frozen_method(toolbox: type[Method]) -> None:
    settings = {"method": "hammer", "weight": 2}
    assert resolve(toolbox, settings, "shed").model_dump() == {"weight": 2.0}
    assert settings == {"method": "hammer", "weight": 2}, "the caller's mapping is left alone"


def wheel(folder: Path) -> Path:
    """Build a wheel that brings one scorer and one thing that is none."""
    path = folder / "guest_scorers-1.2-py3-none-any.whl"
    info = "guest_scorers-1.2.dist-info"
    files = {
        "guest_scorers.py": textwrap.dedent(
            '''
            from pydantic import Field
            from stages.score.scorer import Scorer

            class Guest(Scorer):
                """Scores by nothing in particular."""

                strength: float = Field(1.0, ge=0, description="How much.")

            nothing = 3
            '''
        ),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: guest-scorers\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[lazytrain.scorers]\nguest = guest_scorers:Guest\nno_scorer = guest_scorers:nothing\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_method_of_a_separately_installed_wheel_is_found_resolved_and_versioned(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path)) as archive:  # what an installer does with a pure wheel
        archive.extractall(tmp_path / "site")
    script = textwrap.dedent(
        """
        import sys
        from data_contracts.errors import MethodError
        from data_contracts.method import find, module_of, names, resolve
        from stages.identity import _foreign
        from stages.score.scorer import Scorer
        assert "guest" in names(Scorer)
        assert module_of(Scorer, "guest") == "guest_scorers" and "guest_scorers" not in sys.modules
        assert resolve(Scorer, {"method": "guest", "strength": 2}, "score").strength == 2.0
        try:
            find(Scorer, "no_scorer")
        except MethodError as error:
            assert "subclass of Scorer" in error.promised
        print(_foreign("guest_scorers"))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['guest-scorers==1.2']")
