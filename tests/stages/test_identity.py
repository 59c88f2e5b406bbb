"""A stage's version follows what can change a result: code it reaches, its methods, its libraries; and nothing else."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import CanonicalError
from data_contracts.records import Ref
from stages import identity
from tests.conftest import ROOT


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small house: a stage that reaches a helper lazily, which reaches numpy."""
    write(tmp_path, "stages/__init__.py", "")
    write(tmp_path, "stages/demo/__init__.py", "")
    write(
        tmp_path,
        "stages/demo/stage.py",
        '''
        """A stage."""
        import json
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import torch
        def run():
            """Runs."""
            from stages.demo import engine
            return engine.work()
        ''',
    )
    write(
        tmp_path,
        "stages/demo/engine.py",
        "from . import deep\nimport numpy.linalg\ndef work():\n    return deep.value\n",
    )
    write(tmp_path, "stages/demo/deep.py", "value = 1\n")
    write(tmp_path, "stages/demo/apart.py", "import scipy\nvalue = 1\n")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    return tmp_path


def version(_: Path) -> tuple[dict[str, str], frozenset[str]]:
    identity._read.cache_clear()
    return identity.closure(["stages.demo.stage"])


def test_the_closure_follows_lazy_and_relative_imports_and_leaves_types_out(tree: Path) -> None:
    sources, imported = version(tree)
    assert set(sources) == {"stages", "stages.demo", "stages.demo.stage", "stages.demo.engine", "stages.demo.deep"}
    assert imported == {"json", "typing", "numpy", "__future__"} - {"__future__"}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stages/demo/stage.py", '"""Runs."""', '"""Runs, at last."""'),
        ("stages/demo/stage.py", '"""A stage."""', "# no docstring any more"),
        ("stages/demo/deep.py", "value = 1", "value   =  1  # one"),
        ("stages/demo/deep.py", "value = 1", 'value = 1\n"""What it is."""'),
        ("stages/demo/apart.py", "value = 1", "value = 2"),
    ],
)
def test_a_comment_a_docstring_layout_or_an_unreached_file_changes_nothing(
    tree: Path, file: str, old: str, new: str
) -> None:
    before = version(tree)
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert version(tree) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stages/demo/deep.py", "value = 1", "value = 2"),
        ("stages/demo/deep.py", "value = 1", "value = 1.0"),
        ("stages/demo/engine.py", "return deep.value", "return -deep.value"),
        ("stages/demo/stage.py", "return engine.work()", "return (lambda: engine.work())()"),
    ],
)
def test_code_that_is_reached_changes_the_version(tree: Path, file: str, old: str, new: str) -> None:
    before = version(tree)
    (tree / file).write_text((tree / file).read_text().replace(old, new))
    assert version(tree) != before


def test_a_library_that_is_reached_counts_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.stages.toys import Make

    stage = Make()
    before = identity.stage_version(stage, Make.config())
    assert "numpy" in before.libraries
    assert "torch" not in before.libraries
    real = identity.version
    monkeypatch.setattr(identity, "version", lambda name: "999" if name == "numpy" else real(name))
    after = identity.stage_version(stage, Make.config())
    assert after.libraries["numpy"] == "999"
    assert after.digest != before.digest
    monkeypatch.setattr(identity, "version", lambda name: "999" if name == "torch" else real(name))
    assert identity.stage_version(stage, Make.config()).digest == before.digest


def test_a_method_of_an_installed_package_counts_with_its_version_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "guest_package/__init__.py", "")
    write(tmp_path, "guest_package/method.py", "value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before = identity._foreign("guest_package.method")
    monkeypatch.setattr(identity, "_distributions", lambda: {"guest_package": ["guest"]})
    monkeypatch.setattr(identity, "version", lambda name: "1.2")
    named = identity._foreign("guest_package.method")
    assert "guest==1.2" in named
    write(tmp_path, "guest_package/method.py", "value = 2\n")
    assert len({before, named, identity._foreign("guest_package.method")}) == 3


def ref(digest: str, run: str = "r") -> Ref:
    return Ref(contract="selection/1", run=run, path="selection", digest=digest)


def of(**changed: Any) -> str:
    given = {
        "verb": "train",
        "version": "v",
        "external": {"a": 1},
        "inputs": {"x": (ref("d1"), ref("d2"))},
    }
    return identity.identity_of(**{**given, **changed})


def test_every_part_of_an_identity_matters_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    base = of()
    others = [
        of(verb="score"),
        of(version="w"),
        of(external={"a": 2}),
        of(external={"a": 1.0}),
        of(inputs={"x": (ref("d2"), ref("d1"))}),
        of(inputs={"x": (ref("d1"),)}),
        of(inputs={"y": (ref("d1"), ref("d2"))}),
        of(descent=("a",)),
        of(descent=("a", "b")),
    ]
    monkeypatch.setattr(identity, "device", lambda: "cuda")
    others.append(of())
    assert len({base, *others}) == len(others) + 1
    monkeypatch.undo()
    assert of(inputs={"x": (ref("d1", "elsewhere"), ref("d2"))}) == base
    assert of(inputs={"x": (ref("d1"), ref("d2")), "absent": ()}) == base


def test_a_value_without_a_canonical_form_has_no_identity() -> None:
    with pytest.raises(CanonicalError):
        of(external={"a": float("nan")})


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans(), max_size=5))
def test_the_order_of_keys_does_not_matter(external: dict[str, Any]) -> None:
    assert of(external=external) == of(external=dict(reversed(external.items())))


def test_an_identity_is_the_same_wherever_the_project_lies_and_imports_no_torch(tmp_path: Path) -> None:
    """The same sources in two places, in processes with different hash seeds and time zones, give one version."""
    script = (
        "import sys; from stages.identity import closure; from data_contracts.canonical import digest_of;"
        "print(digest_of(closure(['stages.stage'])[0]), 'torch' in sys.modules)"
    )
    for room in ("stages", "data_contracts"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "methods"))
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=place,
            env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": seed, "HOME": str(tmp_path / seed), "TZ": zone},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for place, seed, zone in ((ROOT, "1", "UTC"), (tmp_path, "2", "Asia/Tokyo"))
    }
    assert len(answers) == 1
    assert answers.pop().endswith("False\n")
