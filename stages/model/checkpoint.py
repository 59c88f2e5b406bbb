"""Checkpoints: a folder of safetensors with the optimizer's moments by parameter name, complete or absent.

Full fine-tuning stores `model.safetensors` (a tied weight once), adapters what PEFT itself stores, with the embedding
under its own name where it trains too, as PEFT loads it; where their base was
held in four bits `trainer.json` says so, and loading holds it so again. The bytes depend on the tensors alone: lists
that PEFT keeps as sets are sorted, and no path of this machine is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data_contracts.errors import ArtifactError
from data_contracts.records import ModelPin
from stages.model.load import grow, load_folder, load_model, load_tokenizer
from stages.model.nf4 import held_in_nf4, hold_in_nf4, release_from_nf4
from stages.model.pin import TOKENIZER_FILES, locate
from stages.model.shards import own, sharded
from stages.model.stored import store

TRAINER, OPTIMIZER, MODEL = "trainer.json", "optimizer.safetensors", "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
FIRST, SECOND, FROZEN = "exp_avg.", "exp_avg_sq.", "frozen_in"

Moments = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TrainedModel:
    """A loaded checkpoint: the model (with its adapters), Adam's two moments by parameter name, `trainer.json`, and the
    optimizer's other tensors by name."""

    model: Any
    moments: Moments
    trainer: dict[str, Any]
    state: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    model: Any,
    pin: ModelPin,
    moments: Moments,
    trainer: dict[str, Any],
    state: Mapping[str, Tensor] | None = None,
    *,
    first: bool = True,
) -> None:
    """Write a checkpoint to `folder` (absent or empty), whole or not at all.

    Args:
        model: the trained model, or a PEFT model, of which what trains is stored.
        moments: (exp_avg, exp_avg_sq) by the name that `model.named_parameters()` gives the parameter.
        trainer: technique, step, tokens, learning_rate, updates, beta2, epsilon; plain JSON. The base's digest is
            added.
        state: the optimizer's other tensors by name.
        first: whether this rank writes; where weights are spread every rank calls, the others only give their parts.

    Raises `ArtifactError` where `folder` already holds something.
    """
    stored = dict(state or {})
    for name, (one, two) in moments.items():
        stored[FIRST + name], stored[SECOND + name] = one, two
    if not first:
        store(None, _weights(model))
        store(None, stored)
        return
    if folder.exists() and any(folder.iterdir()):
        raise ArtifactError("an empty folder for a checkpoint", f"{folder.name} holds files", "give a new folder")
    scratch = folder.parent / f".{folder.name}.unfinished"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    _write_weights(scratch, model, pin)
    _copy_tokenizer(scratch, pin)
    store(scratch / OPTIMIZER, stored)
    held = held_in_nf4(model)
    _write_json(scratch / TRAINER, {**trainer, "base_digest": pin.digest, **({FROZEN: held} if held else {})})
    _make_durable(scratch)
    os.replace(scratch, folder)
    _sync(folder.parent)


def load_checkpoint(
    folder: Path, pin: ModelPin, *, dtype: torch.dtype = torch.float32, device: str = "cpu", trainable: bool = True
) -> TrainedModel:
    """Load a checkpoint of the base `pin`: ties restored, adapters attached, moments by name on `device`.

    Raises `ArtifactError` where a file is missing or cut short, or the checkpoint belongs to another base.
    """
    trainer = read_trainer(folder)
    if trainer.get("base_digest") != pin.digest:
        raise ArtifactError(
            f"a checkpoint of the base {pin.source} ({pin.digest[:12]})",
            f"it was trained from {str(trainer.get('base_digest'))[:12]}",
            "give the base that the checkpoint was made from",
        )
    if (folder / ADAPTER_CONFIG).is_file():
        from peft import PeftModel

        held = trainer.get(FROZEN)
        base = load_model(pin, dtype=dtype, device="cpu" if held else device)
        model: Any = PeftModel.from_pretrained(base, str(folder), is_trainable=True, autocast_adapter_dtype=False)
        if held:
            hold_in_nf4(model, double=held == "nf4_double")
        if not trainable:
            model.requires_grad_(False)
        model.to(device).eval()
    else:
        model = load_folder(folder, dtype=dtype, device=device)
        grow(model, pin.grown_vocabulary)
        model.requires_grad_(trainable)
    stored = _load(folder / OPTIMIZER, device)
    names = [name.removeprefix(FIRST) for name in stored if name.startswith(FIRST)]
    moments = {name: (stored.pop(FIRST + name), stored.pop(SECOND + name)) for name in names}
    if trainable and (name := _embedding(model)) in moments:  # of a plain model it has `requires_grad` already
        model.get_parameter(name).requires_grad_(True)
    return TrainedModel(model, moments, trainer, stored)


def load_merged(folder: Path | None, pin: ModelPin, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Return the model of a checkpoint for evaluation, adapters merged into the weights; the base where None."""
    if folder is None:
        return load_model(pin, dtype=dtype, device=device)
    model = load_checkpoint(folder, pin, dtype=dtype, device=device, trainable=False).model
    return merge_adapters(model) if hasattr(model, "peft_config") else model


def merge_adapters(model: Any) -> Any:
    """Merge PEFT adapters into their weights (held in four bits, they are made whole first); return the plain model.

    A tied weight that one of its two modules adapts is untied first: adding the update in place would change the other
    module too, and storing the weight once would lose one of the two.
    """
    release_from_nf4(model, next(model.parameters()).dtype)
    inner = model.get_base_model()
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    adapted = [layer for layer in (embedding, head) if hasattr(layer, "base_layer")]
    if adapted and inner.config.tie_word_embeddings:
        layer = getattr(head, "base_layer", head)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        inner.config.tie_word_embeddings = False
    merged = model.merge_and_unload()
    merged.eval()
    return merged


def read_trainer(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's `trainer.json`. Raises `ArtifactError` where it cannot be read."""
    try:
        return dict(json.loads((folder / TRAINER).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"a checkpoint with {TRAINER}", str(error), "re-run the training that wrote it") from error


def _write_weights(folder: Path, model: Any, pin: ModelPin) -> None:
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    inner.config.architectures = [type(inner).__name__.removeprefix("FSDP" if sharded(model) else "")]
    inner.config.save_pretrained(folder)
    if not hasattr(model, "peft_config"):
        store(folder / MODEL, _weights(model), metadata={"format": "pt"})
        return
    store(folder / ADAPTER, _weights(model), metadata={"format": "pt"})
    model.active_peft_config.save_pretrained(str(folder))
    path = folder / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    values = {key: sorted(value) if _texts(value) else value for key, value in values.items()}
    _write_json(path, values | {"base_model_name_or_path": pin.source, "inference_mode": True})


def _weights(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint stores of the model, as it is held."""
    if not hasattr(model, "peft_config"):
        return _untied(model.state_dict(), model)
    from peft import get_peft_model_state_dict

    found = dict(get_peft_model_state_dict(model, save_embedding_layers=False))
    name = _embedding(model)
    return found | ({name: weight.detach()} if (weight := model.get_parameter(name)).requires_grad else {})


def _embedding(model: Any) -> str:
    """Return the name of the embedding's weight, as that of an adapter's layer where it has one."""
    weight = model.get_input_embeddings().weight
    return next(name for name, item in model.named_parameters() if item is weight)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _untied(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the state with a tied head left out (it is made from the embedding on loading)."""
    seen: dict[int, str] = {}
    kept = {}
    head = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
    for name in sorted(state, key=lambda name: (name in head, name)):
        if model.config.tie_word_embeddings and name in head and own(state[name]).data_ptr() in seen:
            continue
        seen[own(state[name]).data_ptr()] = name
        kept[name] = state[name]
    return kept


def _copy_tokenizer(folder: Path, pin: ModelPin) -> None:
    names = [entry.path for entry in pin.files if entry.path in TOKENIZER_FILES]
    if names:
        base = locate(pin)
        for name in names:
            shutil.copyfile(base / name, folder / name)
    else:
        load_tokenizer(pin).save_pretrained(folder)


def _load(path: Path, device: str) -> dict[str, Tensor]:
    try:
        return load_file(path, device=device)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"a checkpoint with a whole {path.name}", str(error), "re-run the training that wrote it"
        ) from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _make_durable(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        path.chmod(0o644)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
