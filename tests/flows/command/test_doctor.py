"""`lazytrain doctor` tells what is there and what is missing, and says what to do."""

from __future__ import annotations

import sys

from flows.command import doctor, model
from tests.command import loaded_by


def found(folder) -> dict[str, doctor.Check]:
    return {check.what: check for check in doctor.examine(folder)}


def test_it_tells_python_processor_memory_disk_and_folder(tmp_path):
    checks = found(tmp_path)
    assert checks["Python"].state == "ok"
    assert checks["Python"].found == ".".join(map(str, sys.version_info[:3]))
    for what in ("system", "processor", "memory", "accelerator", "disk", "folder"):
        assert checks[what].found


def test_what_is_not_ok_has_a_remedy(tmp_path):
    for check in doctor.examine(tmp_path):
        assert check.state in doctor.STYLES
        assert (check.state == "ok") == (not check.remedy), check


def test_a_model_that_is_not_fetched_names_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYTRAIN_MODELS", str(tmp_path))
    assert found(tmp_path)["quick-start model"].remedy == "lazytrain model pull"
    place = tmp_path / model.SMALL
    place.mkdir()
    (place / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert found(tmp_path)["quick-start model"].state == "ok"


def test_a_folder_that_cannot_be_written_is_missing(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert found(file / "below")["folder"].state == "missing"


def test_it_loads_no_torch():
    code = "from pathlib import Path\nfrom flows.command.doctor import examine\nlist(examine(Path()))"
    assert loaded_by(code, ("torch", "ray", "prefect", "mlflow")) == []
