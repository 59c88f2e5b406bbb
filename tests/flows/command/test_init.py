"""`lazytrain init` writes a configuration that reads back as what was asked for."""

from __future__ import annotations

import json
import re

import pytest

from data_contracts.config import Config
from data_contracts.config_file import load
from data_contracts.errors import LazyTrainError
from flows.command.init import parse_budget, written
from tests.command import lazytrain

ROWS = [{"prompt": f"What is {n} and {n}?", "completion": str(2 * n)} for n in range(4)]


@pytest.fixture
def project(tmp_path):
    (tmp_path / "base model").mkdir()
    for name in ("pool.jsonl", "target.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_what_is_written_reads_back_as_what_was_asked_for(project):
    arguments = ["--model", "base model", "--pool", "pool.jsonl", "--target", "target.jsonl", "--budget", "6GB 90min"]
    done = lazytrain("init", *arguments, cwd=project)
    assert done.returncode == 0, done.stderr
    config = load(project / "lazytrain.yaml")
    assert config.model.path == "base model"
    assert config.data.pool == ("pool.jsonl",)
    assert config.data.target == ("target.jsonl",)
    assert config.budget.peak_bytes == 6 * 10**9
    assert config.budget.seconds == 5400
    assert "4 rows" in (project / "lazytrain.yaml").read_text()


def test_a_configuration_that_is_there_is_not_replaced(project):
    (project / "lazytrain.yaml").write_text("mine")
    done = lazytrain("init", "--model", "m", cwd=project)
    assert done.returncode == 2
    assert (project / "lazytrain.yaml").read_text() == "mine"


def test_without_a_terminal_what_is_missing_is_named(project):
    done = lazytrain("init", "--model", "base model", cwd=project)
    assert done.returncode == 2
    assert "--pool" in done.stderr
    assert not (project / "lazytrain.yaml").exists()


def test_a_pool_that_is_not_there_is_refused(project):
    with pytest.raises(LazyTrainError, match=r"missing\.jsonl"):
        written(
            "base model", [str(project / "missing.jsonl")], [str(project / "target.jsonl")], "6GB", project / "c.yaml"
        )


def test_the_schema_is_the_configurations_own(tmp_path):
    done = lazytrain("init", "--schema", cwd=tmp_path)
    assert set(json.loads(done.stdout)["properties"]) == set(Config.model_fields)


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("24GB 2h", {"peak_bytes": "24GB", "seconds": "2h"}),
        ("6gib, 1e15flops", {"peak_bytes": "6gib", "flops": 10**15}),
        ("5e8tokens", {"tokens": 5 * 10**8}),
    ],
)
def test_a_budget_is_read_from_words(words, section):
    assert parse_budget(words) == section


def test_a_budget_part_without_a_unit_is_refused():
    with pytest.raises(LazyTrainError, match="'6'"):
        parse_budget("6 2h")


@pytest.mark.parametrize("word", ["1e999flops", "1..2GB", "1e999GB", "..tokens"])
def test_a_budget_that_is_no_number_is_refused(word):
    with pytest.raises(LazyTrainError, match=re.escape(word)):
        parse_budget(word)


@pytest.mark.parametrize("name", ["not\udcffutf8.jsonl", "two\nlines.jsonl"])
def test_a_name_that_yaml_cannot_hold_is_refused(project, name):
    pool = project / name
    pool.write_text((project / "pool.jsonl").read_text())
    with pytest.raises(LazyTrainError, match="rename"):
        written("base model", [str(pool)], [str(project / "target.jsonl")], "6GB", project / "c.yaml")


def test_a_place_that_cannot_be_written_is_refused(project):
    files = ["--pool", "pool.jsonl", "--target", "target.jsonl"]
    done = lazytrain(
        "init", "--model", "base model", *files, "--budget", "6GB", "--out", "pool.jsonl/c.yaml", cwd=project
    )
    assert done.returncode == 2
    assert "can be written" in done.stderr


def test_an_empty_target_is_called_empty(project):
    (project / "target.jsonl").write_text("")
    with pytest.raises(LazyTrainError, match=r"target\.jsonl is empty"):
        written("base model", [str(project / "pool.jsonl")], [str(project / "target.jsonl")], "6GB", project / "c.yaml")


@pytest.mark.parametrize(("model", "said"), [("bsae model", "did you mean base model?"), ("./elsewhere", "no folder")])
def test_a_misspelt_folder_is_not_taken_for_a_hub_name(project, model, said):
    done = lazytrain(
        "init", "--model", model, "--pool", "pool.jsonl", "--target", "target.jsonl", "--budget", "6GB", cwd=project
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert not (project / "lazytrain.yaml").exists()
