"""Files made to run code or to lead out of their folder: each is refused with a typed error, and nothing runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_contracts.config import IngestConfig, ModelConfig
from data_contracts.errors import LazyTrainError
from data_contracts.records import CONTRACTS, ModelPin
from data_contracts.store.artifacts import validate
from stages.model.checkpoint import load_checkpoint
from stages.model.load import load_model, load_tokenizer, pin_model
from tests.local_work import LocalWork
from tests.stages.ingest.files import GIVES, ingest_files

pytestmark = pytest.mark.shared


class Bomb:
    """A value whose unpickling makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.canary),))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What stands there once code of a file has run; the bomb is seen to work."""
    trial = tmp_path / "trial"
    pickle.loads(pickle.dumps(Bomb(trial)))
    assert trial.is_dir()
    return tmp_path / "canary"


@pytest.fixture
def folder(tmp_path: Path, shared: Path) -> Path:
    """A copy of a sound model."""
    return Path(shutil.copytree(shared / "data" / "stories260k", tmp_path / "model"))


def load(folder: Path) -> None:
    """Load a model and its tokenizer as the stages do."""
    pin = pin_model(ModelConfig(path=folder.name), folder.parent)
    load_model(pin)
    load_tokenizer(pin)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.ckpt"])
def test_a_pickled_checkpoint_in_place_of_weights_is_refused(folder: Path, canary: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(LazyTrainError):
        load(folder)
    assert not canary.exists()


def test_a_pickle_called_safetensors_is_refused(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(LazyTrainError):
        load(folder)
    assert not canary.exists()


def test_a_pickle_beside_sound_weights_is_never_opened(folder: Path, canary: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))
    (folder / "training_args.bin").write_bytes(pickle.dumps(Bomb(canary)))
    with contextlib.suppress(LazyTrainError):  # refusing such a folder is right too
        load(folder)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_or_tokenizer_that_names_code_of_its_own_is_refused(folder: Path, canary: Path, file: str) -> None:
    (folder / "hostile.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Model: ...\nclass Tok: ...\n")
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    values["auto_map"] = {
        "AutoModelForCausalLM": "hostile.Model",
        "AutoConfig": "hostile.Model",
        "AutoTokenizer": ["hostile.Tok", "hostile.Tok"],
    }
    path.write_text(json.dumps(values))
    with pytest.raises(LazyTrainError):
        load(folder)
    assert not canary.exists()


def test_a_chat_template_cannot_reach_python(folder: Path, canary: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.mkdir('%s') }}"
    config["chat_template"] = reach % canary
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder.parent / "pool.jsonl").write_text(json.dumps({"prompt": "Say it.", "completion": "It."}) + "\n")
    work = LocalWork(folder.parent / "work", {**GIVES, "pool_tokens": "tokens"})
    with contextlib.suppress(LazyTrainError):
        ingest_files(
            ["pool.jsonl"], model=ModelConfig(path=folder.name), settings=IngestConfig(), work=work, root=folder.parent
        )
        assert not work.rows("pool"), "no row can be written by such a template"
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pool.jsonl", "pool.json", "pool.csv", "pool.parquet", "pool.arrow", "pool.txt"])
def test_a_pickle_called_data_gives_no_row_and_runs_nothing(tmp_path: Path, canary: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(canary)))
    work = LocalWork(tmp_path / "work", GIVES)
    with contextlib.suppress(LazyTrainError):
        ingest_files([name], model=None, settings=IngestConfig(), work=work, root=tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["data.npy", "data.npz", "data.pkl", "data.pt", "data.tar", "data.zip"])
def test_formats_that_can_hold_a_pickle_or_a_path_are_not_read(tmp_path: Path, canary: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith((".npy", ".npz")):
        np.save(path, np.array([Bomb(canary)], dtype=object), allow_pickle=True)
        if not path.exists():
            path.with_name(path.name + ".npy").rename(path)
    elif name.endswith(".tar"):
        (tmp_path / "x").write_text("x")
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "x", "../../out-of-the-folder.jsonl")
    elif name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("../../out-of-the-folder.jsonl", "{}")
    else:
        path.write_bytes(pickle.dumps(Bomb(canary)))
    work = LocalWork(tmp_path / "work", GIVES)
    with pytest.raises(LazyTrainError):
        ingest_files([name], model=None, settings=IngestConfig(), work=work, root=tmp_path)
    assert not canary.exists()
    assert not (tmp_path.parent.parent / "out-of-the-folder.jsonl").exists()


def test_a_folder_of_data_with_a_loading_script_is_read_without_it_or_refused(tmp_path: Path, canary: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    (tmp_path / "set" / "a.jsonl").write_text(json.dumps({"prompt": "Q?", "completion": "A"}) + "\n")
    work = LocalWork(tmp_path / "work", GIVES)
    ingest_files(["set"], model=None, settings=IngestConfig(), work=work, root=tmp_path)
    assert len(work.rows("pool")) == 1
    assert not canary.exists()


def test_a_checkpoint_payload_may_hold_no_file_that_can_run(tmp_path: Path, canary: Path) -> None:
    for name in ("trainer.json", "optimizer.safetensors"):
        (tmp_path / name).write_text("{}")
    for name in ("model.bin", "model.pt", "hook.py", "data.npy", "data.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(canary)))
        with pytest.raises(LazyTrainError, match="not allowed"):
            validate(CONTRACTS["checkpoint"], tmp_path, ["optimizer.safetensors", "trainer.json", name])
        (tmp_path / name).unlink()
    assert not canary.exists()


def test_moments_that_are_a_pickle_are_refused(folder: Path, tmp_path: Path, canary: Path) -> None:
    pin: ModelPin = pin_model(ModelConfig(path=folder.name), folder.parent)
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "trainer.json").write_text(json.dumps({"base_digest": pin.digest, "technique": {"method": "full"}}))
    shutil.copy(folder / "model.safetensors", place / "model.safetensors")
    (place / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(LazyTrainError):
        load_checkpoint(place, pin)
    assert not canary.exists()


def test_a_source_is_a_file_or_folder_and_a_url_is_not_fetched(tmp_path: Path) -> None:
    for name in ("http://127.0.0.1:9/pool.jsonl", "file:///etc/passwd", "s3://bucket/pool.jsonl"):
        with pytest.raises(LazyTrainError):
            ingest_files(
                [name], model=None, settings=IngestConfig(), work=LocalWork(tmp_path / "work", GIVES), root=tmp_path
            )
