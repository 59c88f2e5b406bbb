"""Pinning a base model: which files it is, what they hold, and one digest for all of it. Imports no torch.

A model is a folder of safetensors, or one GGUF file, with its config and tokenizer; a hub name is resolved to a commit
in the local cache first. Files that would run code when loaded (pickles, `auto_map`) are refused, here and for good.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_contracts.canonical import digest_of, file_sha256, tree_digest
from data_contracts.config import ModelConfig
from data_contracts.errors import ArtifactError, ModelError
from data_contracts.records import FileEntry, ModelPin
from stages.model.gguf_header import read_gguf_header
from stages.stage import Artifact, Work

WHERE_FILE = "where.json"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "token_embd.weight")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
_hashes: dict[tuple[str, int, int, int], str] = {}
_folders: dict[str, Path] = {}


def pin_model(model: ModelConfig, root: Path, *, resize: bool = False) -> ModelPin:
    """Find the model that the configuration names, digest its files and read its shape from their headers.

    Args:
        model: a folder relative to `root`, or a hub name.
        root: the folder that relative paths start from.
        resize: whether the embedding is grown on loading where the tokenizer has ids past its end.

    Raises `ModelError` for a folder without safetensors or GGUF, with pickled weights only, with code of its own
    (`auto_map`), quantised, of another kind than a causal language model, or a hub name that is missing or gated.
    """
    folder, source, locator = _folder(model, root)
    weights = weight_files(folder)
    names = [path.name for path in weights] + [n for n in (*CONFIG_FILES, *TOKENIZER_FILES) if (folder / n).is_file()]
    index = folder / "model.safetensors.index.json"
    names += [index.name] if index.is_file() and weights[0].suffix == ".safetensors" else []
    files = tuple(_entry(folder / name) for name in sorted(set(names)))
    facts = _gguf_facts(weights[0]) if weights[0].suffix == ".gguf" else _safetensors_facts(folder, weights)
    digest = tree_digest([(entry.path, entry.bytes, entry.sha256) for entry in files], "model/1")
    _folders[digest] = folder
    highest = highest_token(folder) if resize else None
    return ModelPin(
        source=source,
        locator=locator,
        digest=digest,
        tokenizer_digest=_tokenizer_digest(files),
        files=files,
        grown_vocabulary=highest[1] + 1 if highest and highest[1] >= facts["vocabulary"] else 0,
        **facts,
    )


def write_pin(work: Work, pin: ModelPin) -> None:
    """Write output `base`. Where a local folder lies is measured: the same model elsewhere is the same artifact."""
    local = not pin.locator.startswith("hub:")
    work.record("base", pin.model_copy(update={"locator": ""}) if local else pin)
    if local:
        work.measured("base", WHERE_FILE).write_text(json.dumps({"folder": pin.locator}), encoding="utf-8")


def read_pin(base: Artifact) -> ModelPin:
    """Read a `base` artifact, with the folder that the model lay in when it was pinned."""
    pin = base.record(ModelPin)
    if pin.locator:
        return pin
    where = base.measured(WHERE_FILE)
    if not where.is_file():
        return pin
    return pin.model_copy(update={"locator": _json(where)["folder"]})


def locate(pin: ModelPin) -> Path:
    """Return the folder of a pinned model, its files verified by size and sha256 (hashed once a process).

    A folder is looked for where it was pinned, then below the one that `LAZYTRAIN_MODELS` names: a container may see
    it elsewhere.

    Raises `ArtifactError` where it is gone or a file has changed, `ModelError` where a hub name cannot be had.
    """
    if pin.locator.startswith("hub:"):
        name, _, commit = pin.locator.removeprefix("hub:").rpartition("@")
        folder = _snapshot(name, commit)
    else:
        models = os.environ.get("LAZYTRAIN_MODELS")
        places = [Path(pin.locator)] if pin.locator else []
        places += [_folders[pin.digest]] if pin.digest in _folders else []
        places += [Path(models) / pin.source] if models else []
        folder = next((place for place in places if place.is_dir()), [*places, Path(pin.source)][0])
    for entry in pin.files:
        path = folder / entry.path
        if not path.is_file():
            raise ArtifactError(
                f"the base model {pin.source} where it was pinned", f"{path} is gone",
                f"put it back there, or in a folder {pin.source}/ below what LAZYTRAIN_MODELS names",
            )  # fmt: skip
        if path.stat().st_size != entry.bytes or _sha256(path) != entry.sha256:
            raise ArtifactError(
                f"the base model {pin.source} as it was pinned",
                f"{path} has changed since",
                "restore the file, or start a new run with the new model",
            )
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder: its safetensors shards, or its one GGUF file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    quantised = sorted(folder.glob("*.gguf"))
    if len(quantised) == 1:
        return quantised
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if quantised:
        raise ModelError(
            "one GGUF file in the model's folder",
            f"{folder.name} holds {', '.join(path.name for path in quantised)}",
            "keep the one to train in a folder of its own",
        )
    raise ModelError(
        "a model's folder holds model.safetensors (or shards with an index) or one .gguf file",
        f"{folder.name} holds " + (f"only pickled weights ({', '.join(pickles)})" if pickles else "no weights"),
        "loading a pickle can run any code: convert the weights to safetensors where you trust them"
        if pickles
        else "point `model.path` at the folder with the weights",
    )


def _folder(model: ModelConfig, root: Path) -> tuple[Path, str, str]:
    if model.path is not None:
        folder = (root / model.path).expanduser().resolve()
        if not folder.is_dir():
            raise ModelError("`model.path` is a folder", f"{folder} is not", "see `lazytrain model pull`")
        return folder, folder.name, str(folder)
    assert model.hub is not None, "the configuration gives one of the two"
    folder = _snapshot(model.hub, model.revision)
    return folder, model.hub, f"hub:{model.hub}@{folder.name}"


def _snapshot(name: str, revision: str | None) -> Path:
    """Return the local snapshot of a hub model: from the cache, else downloaded (safetensors only)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.safetensors", "model.safetensors.index.json", *CONFIG_FILES, *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"access to {name}", "its licence must be accepted first",
            f"open https://huggingface.co/{name}, accept the licence, and set HF_TOKEN",
        ) from error  # fmt: skip
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} in the local cache, or a hub that can be reached", "neither is so",
            "connect, run `lazytrain model pull`, or give `model.path`",
        ) from error  # fmt: skip
    except (RepositoryNotFoundError, HfHubHTTPError) as error:
        raise ModelError(
            f"a model called {name} on the hub", str(error).splitlines()[0],
            f"check the name at https://huggingface.co/{name}; for a private model set HF_TOKEN",
        ) from error  # fmt: skip


def _safetensors_facts(folder: Path, weights: Iterable[Path]) -> dict[str, Any]:
    config = _json(folder / "config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    _refuse_code(folder, config)
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError("a causal language model", f"config.json names {architecture}", "give a decoder-only model")
    if config.get("quantization_config"):
        raise ModelError(
            "weights in floating point", "config.json has a quantization_config", "give the unquantised model"
        )
    shapes = {k: v for path in weights for k, v in _shapes(path).items() if not k.endswith(_BUFFERS)}
    tied = bool(config.get("tie_word_embeddings", architecture not in ("LlamaForCausalLM", "MistralForCausalLM")))
    embedding = next((shape for name, shape in shapes.items() if name.endswith(EMBEDDINGS)), None)
    if embedding is None:
        raise ModelError("an embedding among the weights", f"none of {len(shapes)} tensors is one", "check the model")
    count = sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name.endswith(HEADS)))
    return {
        "architecture": architecture,
        "parameters": count,
        "layers": int(config.get("num_hidden_layers") or config.get("n_layer") or 0),
        "hidden": int(config.get("hidden_size") or config.get("n_embd") or embedding[1]),
        "vocabulary": embedding[0],
        "tied_embeddings": tied,
        "longest": int(config.get("max_position_embeddings") or config.get("n_positions") or 2048),
    }


def _gguf_facts(path: Path) -> dict[str, Any]:
    header = read_gguf_header(path)
    name = header.metadata.get("general.architecture")
    if name != "llama":
        raise ModelError("a GGUF file of the architecture llama", f"{path.name} is {name}", "give it as safetensors")
    return {
        "architecture": "LlamaForCausalLM",
        "parameters": header.parameters,
        "layers": int(header.metadata["llama.block_count"]),
        "hidden": int(header.metadata["llama.embedding_length"]),
        "vocabulary": header.shapes["token_embd.weight"][0],
        "tied_embeddings": "output.weight" not in header.shapes,
        "longest": int(header.metadata["llama.context_length"]),
    }


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    tokenizer = folder / "tokenizer_config.json"
    for name, values in (("config.json", config), (tokenizer.name, _json(tokenizer) if tokenizer.is_file() else {})):
        if values.get("auto_map"):
            raise ModelError(
                "a model that loads without code of its own",
                f"{name} has an auto_map ({', '.join(map(str, values['auto_map']))})",
                "use an architecture that transformers has built in",
            )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes from a safetensors header: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError("a whole safetensors file", f"{path.name}: {error}", "download it again") from error
    return {name: tuple(item["shape"]) for name, item in header.items() if name != "__metadata__"}


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} is a JSON object", str(error), "restore the file") from error


def highest_token(folder: Path) -> tuple[str, int] | None:
    """Return the tokenizer's token with the highest id, and the id; None where the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = _json(path)
    vocabulary = tokenizer["model"]["vocab"]
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {item[0]: at for at, item in enumerate(vocabulary)}
    tokens |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return max(tokens.items(), key=lambda item: item[1], default=None)


def _entry(path: Path) -> FileEntry:
    return FileEntry(path=path.name, bytes=path.stat().st_size, sha256=_sha256(path))


def _tokenizer_digest(files: Iterable[FileEntry]) -> str:
    """Digest the tokenizer's files; a GGUF file carries its own tokenizer and stands for it where nothing else does."""
    own = {entry.path: entry.sha256 for entry in files if entry.path in TOKENIZER_FILES}
    if "tokenizer.json" not in own and "tokenizer.model" not in own and "vocab.json" not in own:
        own |= {entry.path: entry.sha256 for entry in files if entry.path.endswith(".gguf")}
    return digest_of(own)


def _sha256(path: Path) -> str:
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)
    if key not in _hashes:
        _hashes[key] = file_sha256(path)
    return _hashes[key]
