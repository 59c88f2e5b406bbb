"""The command answers at once, loads nothing heavy, and ends with honest codes and three-line errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.command import lazytrain, loaded_by
from tests.conftest import ROOT


def test_help_loads_neither_torch_nor_ray_nor_prefect_nor_mlflow():
    code = "from flows.command.app import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_by(code) == []


def test_importing_the_pipeline_loads_neither_torch_nor_ray():
    assert loaded_by("import flows.pipeline", ("torch", "ray", "transformers")) == []


def test_help_names_every_command(tmp_path):
    done = lazytrain("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in (
        "init",
        "run",
        "plan",
        "stage",
        "resume",
        "gc",
        "status",
        "ui",
        "doctor",
        "model",
        "quickstart",
        "ingest",
        "promote",
    ):
        assert f" {name} " in done.stdout


def test_every_command_has_a_help_page_of_its_own(tmp_path):
    from flows.command.app import COMMANDS

    for name in COMMANDS:
        done = lazytrain(name, "--help", cwd=tmp_path)
        assert done.returncode == 0, (name, done.stderr)
        assert "--install-completion" not in done.stdout, name


def test_an_unknown_command_is_answered_with_the_nearest_one(tmp_path):
    done = lazytrain("statsu", cwd=tmp_path)
    assert done.returncode == 2
    assert "status" in done.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_missing_configuration_is_refused_in_three_lines_and_without_a_traceback(tmp_path, command):
    done = lazytrain(command, "nothing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert "nothing.yaml" in lines[0]
    assert lines[1].startswith("  expected: ")
    assert lines[2].startswith("  remedy:")
    assert "Traceback" not in done.stderr


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "lazytrain.yaml").write_text("model: {path: m}\ndata: {pool: p, target: t}\nbudgets: {}\n")
    done = lazytrain("run", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'budget'?" in done.stderr


COVERAGE = "{method: cascade, filters: [{method: length, keep: 0.4, ordr: shortest}]}"


@pytest.mark.parametrize(
    ("command", "section", "where"),
    [
        ("run", f"score: {{coverage: {COVERAGE}}}", "score"),
        (
            "plan",
            f"auto: {{arms: [random, {{name: mine, scorer: {{method: influence}}, coverage: {COVERAGE}}}]}}",
            "auto.arms.1",
        ),
    ],
)
def test_a_setting_deep_inside_a_coverage_is_refused_before_anything_is_done(tmp_path, command, section, where):
    """The scorer of a filter is reached after the warm-up; here there is neither a model nor data."""
    (tmp_path / "lazytrain.yaml").write_text(f"model: {{path: m}}\ndata: {{pool: p, target: t}}\n{section}\n")
    done = lazytrain(command, cwd=tmp_path)
    assert done.returncode == 2
    assert f"`{where}.coverage.filters.0.ordr` is unknown: did you mean 'order'?" in done.stderr
    assert not (tmp_path / ".lazytrain" / "mlflow.db").exists()


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in lazytrain("--debug", "run", "nothing.yaml", cwd=tmp_path).stderr


def test_a_foreign_room_on_the_path_is_refused(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").touch()
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import flows.environment as e; "
        f"sys.path.insert(0, {str(tmp_path)!r}); e.refuse_foreign_rooms()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "another `stages` comes first on the Python path" in done.stderr


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130), (ValueError(), None)])
def test_an_error_after_a_signal_is_the_end_that_was_asked_for(end, code):
    from stages.ending import ended_by

    error = ConnectionError("the server ended first")
    error.__context__ = end
    assert ended_by(error) == code


def test_an_interrupt_inside_text_that_is_executed_still_ends_with_130(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "from flows.command import app\n"
        "text = 'import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**6): pass'\n"
        "app.app = lambda arguments: exec(text)\n"
        "app.main([])\n"
    )
    done = subprocess.run(  # as a module: a script's exit code hides what is tested
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "what was committed is kept" in done.stderr
