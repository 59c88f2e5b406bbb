"""Loading a pinned model and its tokenizer: safetensors or GGUF, never a pickle, never code from the model's folder.

What comes back is a plain transformers model in evaluation mode, every weight taken from the file (a missing one is an
error, not a random number). Importing this module imports no torch; pinning and locating live in `pin.py`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_contracts.errors import ModelError
from data_contracts.records import ModelPin
from stages.model.gguf_weights import llama_config, load_llama
from stages.model.pin import locate, pin_model, weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["config_of", "empty_model", "grow", "load_folder", "load_model", "load_tokenizer", "locate", "pin_model"]


def load_tokenizer(pin: ModelPin) -> PreTrainedTokenizerFast:
    """Return the model's own tokenizer, once a process: from its files, or from the GGUF file where there are none.

    Raises `ModelError` where there is none, or only a slow one (no offsets, so no answer mask).
    """
    return _tokenizer(locate(pin), pin.source, pin.tokenizer_digest)


@lru_cache(maxsize=4)  # reading a GGUF vocabulary of 49,152 tokens takes 6 s
def _tokenizer(folder: Path, source: str, digest: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    gguf = _gguf(folder)
    if gguf is not None and not (folder / "tokenizer.json").is_file():
        settings["gguf_file"] = gguf.name
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source} has a tokenizer", str(error), "add tokenizer.json to its folder") from error
    if not tokenizer.is_fast:
        raise ModelError("a fast tokenizer", f"{type(tokenizer).__name__} is slow", "add tokenizer.json to its folder")
    return tokenizer


def load_model(pin: ModelPin, *, dtype: torch.dtype | None = None, device: str = "cpu") -> PreTrainedModel:
    """Return the pinned model: `dtype` (float32 where None) on `device`, eval(), no cache, grown if pinned so.

    Raises `ModelError` where weights are missing, do not fit the config, or the head is not a plain projection.
    """
    model = load_folder(locate(pin), dtype=dtype, device=device)
    if pin.grown_vocabulary:
        grow(model, pin.grown_vocabulary)
    return model


def load_folder(folder: Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> PreTrainedModel:
    """Load a model from a folder of safetensors or one GGUF file; see `load_model`."""
    import torch

    from stages.meter.memory import return_freed_memory
    from stages.model.loss import verify_head

    if device == "cpu":
        return_freed_memory()  # what a plan predicts is tensors: the allocator must not keep much besides
    dtype = torch.float32 if dtype is None else dtype
    gguf = _gguf(folder)
    model: Any = _from_safetensors(folder, dtype) if gguf is None else load_llama(gguf, dtype)
    model.config.use_cache = False
    model.config._name_or_path = ""  # a path of this machine must not travel with a checkpoint
    model.eval()
    verify_head(model)
    return model.to(device)


def config_of(pin: ModelPin) -> PretrainedConfig:
    """Return the model's transformers config, reading no weights."""
    folder = locate(pin)
    gguf = _gguf(folder)
    if gguf is not None:
        return llama_config(gguf)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def empty_model(pin: ModelPin, *, layers: int | None = None, vocabulary: int | None = None) -> PreTrainedModel:
    """Build the model on the meta device (no weights, no memory), with fewer layers where asked."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(pin)
    config.use_cache = False
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    rows = vocabulary or pin.grown_vocabulary
    if rows:
        config.vocab_size = rows
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def grow(model: Any, vocabulary: int) -> None:
    """Grow the embedding (and head) to `vocabulary` rows; each new row is the mean of the old ones.

    The mean gives a new token the average logit, and unlike a draw it is the same on every load.
    """
    import torch

    old = model.get_input_embeddings().weight.shape[0]
    if vocabulary <= old:
        return
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight = layer.weight
            weight[old:] = weight[:old].mean(dim=0)


def _gguf(folder: Path) -> Path | None:
    files = weight_files(folder)
    return files[0] if files[0].suffix == ".gguf" else None


def _from_safetensors(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{folder.name} holds a loadable model", str(error), "check config.json and weights"
        ) from error
    model, info = loaded
    wrong = sorted(map(str, info["missing_keys"])) + sorted(str(item) for item in info.get("mismatched_keys", ()))
    if wrong:
        raise ModelError(
            "every weight of the architecture is in the files",
            f"{len(wrong)} are missing or of another shape, such as {', '.join(wrong[:3])}",
            "restore the model's files",
        )
    return model
