"""What a scorer is given: the model, the target, the blocks; only what its `reads` lists, each counted when used.

Torch, the model and the tokens are loaded here and only where they are read, so a scorer that reads nothing starts at
once. Loading and operation counts belong to the nouns *model* and *meter*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from data_contracts.config import ScoreConfig
from data_contracts.records import ModelPin, Plan
from stages.model.pin import read_pin
from stages.score.glance import Glance, first_answers
from stages.score.partition import batches
from stages.score.places import at
from stages.score.scorer import Block, Given, Meter, Scorer
from stages.stage import Artifact, Inputs
from stages.text.examples import text_of

if TYPE_CHECKING:
    from stages.model.batch import TokenBatch
    from stages.model.checkpoint import TrainedModel

ROWS_A_BLOCK = 512
"""Rows of a block that holds no tokens."""


class FlopMeter(Meter):
    """Counts passes over batches by the operators that they run, traced once a model."""

    def __init__(self, model: Any, *, train: bool) -> None:
        from stages.meter.flops import FlopModel

        self._costs = FlopModel.trace(model, train=train)

    def forward(self, batch: TokenBatch) -> None:
        self.flops += self._costs.forward(*batch.shape, len(batch.answers.label_N))
        self.tokens += batch.tokens

    def decoder(self, batch: TokenBatch) -> None:
        self.flops += self._costs.forward(*batch.shape, 0)
        self.tokens += batch.tokens

    def train(self, batch: TokenBatch) -> None:
        self.flops += self._costs.train(*batch.shape, len(batch.answers.label_N))
        self.tokens += batch.tokens


class Told(Protocol):
    """What supplying needs of a stage's `Work`."""

    def seed(self, *names: str | int) -> int: ...

    def notice(self, text: str) -> None: ...


@dataclass(frozen=True)
class Opened:
    """A prepared method: what it was given, what its `prepare` returned, and what makes its blocks."""

    method: Scorer
    given: Given
    state: Any
    maker: BlockMaker


def open_scorer(
    config: ScoreConfig, method: Scorer, inputs: Inputs, work: Told, pool: pa.Table, resources: ExitStack
) -> Opened:
    """Supply and prepare a method; `resources` closes it."""
    given = supply(config, method, inputs, work, resources)
    return Opened(method, given, method.prepare(given), BlockMaker(method, given, pool))


def supply(config: ScoreConfig, method: Scorer, inputs: Inputs, work: Told, resources: ExitStack) -> Given:
    """Gather what `method` reads.

    Raises `ArtifactError` for a checkpoint of another base, `ModelError` where the model cannot be loaded.
    """
    shown: set[str] = set()

    def notice(text: str) -> None:
        if text not in shown:
            shown.add(text)
            work.notice(text)

    given: dict[str, Any] = {"meter": Meter()}
    if "model" in method.reads:
        planned = inputs.maybe("plan")
        plan = planned.record(Plan) if planned else None
        device = device_of_models()
        several = "checkpoints" in method.reads
        wanted = inputs.all("checkpoint") if several else inputs.all("checkpoint")[-1:]
        loaded = [_trained(read_pin(inputs.one("base")), checkpoint, device) for checkpoint in wanted or (None,)]
        trained = loaded[-1]
        given |= {"device": device, "trained": trained, "autocast": _autocast(plan), "plan": plan}
        given["checkpoints"] = loaded if several else ()
        if "reference" in method.reads:
            given["reference"] = _trained(read_pin(inputs.one("base")), inputs.one("reference"), device)
        given["meter"] = FlopMeter(trained.model, train=method.passes == "train" or "moments" in method.reads)
    if "example_losses" in method.reads:
        given["example_losses"] = [artifact.folder for artifact in inputs.all("example_losses")]
    if method.grouped:
        target = inputs.one("target_tokens").table()
        given["groups"], given["members"] = _groups(config, target.column("source"))
        if {"tokens", "model"} & method.reads:
            from stages.model.batch import TokenTable

            given["target"] = TokenTable(target)
        if "text" in method.reads:
            examples = inputs.one("target").table()
            ids = target.column("example_id").to_pylist()
            given["target_texts"] = [text_of(examples, example_id) for example_id in ids]
    if "text" in method.reads:
        given["examples"] = inputs.one("pool").table()
    return Given(
        seed=work.seed("score", method.name()),
        pool_rows=inputs.one("pool_tokens").table().num_rows,
        batch_tokens=config.batch_tokens,
        notice=notice,
        resources=resources,
        **given,
    )


def _groups(config: ScoreConfig, sources: pa.ChunkedArray) -> tuple[tuple[str, ...], tuple[np.ndarray, ...]]:
    """Return the target groups' names, sorted, and each one's row numbers."""
    if config.groups == "all" or not len(sources):
        return ("all",), (np.arange(len(sources)),)
    encoded = sources.combine_chunks().dictionary_encode()
    names, code_N = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    order = sorted(range(len(names)), key=lambda index: names[index])
    return tuple(names[index] for index in order), tuple(np.flatnonzero(code_N == index) for index in order)


def device_of_models() -> str:
    """Return where models are put: "cuda" where there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _trained(pin: ModelPin, checkpoint: Artifact | None, device: str) -> TrainedModel:
    """Load the checkpoint, or the base; what has moments is differentiated (without any moments: all that trains)."""
    from stages.model.checkpoint import TrainedModel, load_checkpoint
    from stages.model.load import load_model

    if checkpoint is None:
        trained = TrainedModel(load_model(pin, device=device), {}, {})
    else:
        trained = load_checkpoint(checkpoint.folder, pin, device=device)
    trained.model.eval()
    for name, parameter in trained.model.named_parameters():
        parameter.requires_grad_(name in trained.moments if trained.moments else parameter.requires_grad)
    return trained


def _autocast(plan: Plan | None) -> Any:
    if plan is None or plan.precision == "float32":
        return None
    import torch

    return torch.bfloat16


def lengths_seen(method: Scorer, pool: pa.Table, glance: Glance | None) -> np.ndarray:
    """Return how many tokens of each row of the pool the method looks at."""
    lengths_N: np.ndarray = pool.column("n_tokens").to_numpy()
    if glance is None or not {"tokens", "model"} & method.reads:
        return lengths_N
    return glance.lengths(first_answers(pool), lengths_N)


class BlockMaker:
    """Makes blocks of pool rows, and says which rows go together.

    Args:
        glance: how much of each row is looked at; None: the whole of it.
    """

    def __init__(self, method: Scorer, given: Given, pool: pa.Table, glance: Glance | None = None) -> None:
        self._method, self._given, self._glance = method, given, glance
        self._ids = pool.column("example_id")
        self._answers_N = pool.column("n_answer_tokens").to_numpy()
        self.lengths_N = lengths_seen(method, pool, glance)
        self._tokens: Any = None
        if {"tokens", "model"} & method.reads:
            from stages.model.batch import TokenTable

            self._tokens = TokenTable(pool)

    def batches(self, rows: np.ndarray) -> Iterator[list[int]]:
        """Yield the rows of each block of a shard: by length where tokens are read, else as they come."""
        if self._tokens is None:
            yield from (rows[at : at + ROWS_A_BLOCK].tolist() for at in range(0, len(rows), ROWS_A_BLOCK))
            return
        ids = at(self._ids, rows).to_pylist()
        for places in batches(ids, self.lengths_N[rows].tolist(), self._given.batch_tokens):
            yield rows[places].tolist()

    def block(self, rows: Sequence[int]) -> Block:
        """Return the block of these rows."""
        index = np.asarray(rows)
        ids = at(self._ids, index).to_pylist()
        batch, texts, answers_B = None, None, self._answers_N[index]
        if self._tokens is not None:
            from stages.model.batch import collate

            found = [self._tokens.row(row) for row in rows]
            if self._glance is not None:
                found = [self._glance.of(row) for row in found]
                answers_B = np.array([row.answer_mask.sum() for row in found], dtype=np.int32)
            batch = collate(found).to(self._given.device)
        if "text" in self._method.reads:
            texts = [text_of(self._given.examples, example_id) for example_id in ids]
        return Block(ids, self.lengths_N[index], answers_B, self._given.meter, batch, texts)

    def settle(self, block: Block) -> None:
        """Count what one scored block cost."""
        if block.batch is not None and self._method.passes != "none":
            getattr(block.meter, self._method.passes)(block.batch)


class NoMemory:
    """Stands where no model is read: nothing worth measuring is held."""

    bytes = 0

    def __enter__(self) -> NoMemory:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def memory_meter(methods: Iterable[Scorer]) -> Any:
    """Return a context whose `bytes` is the memory peak inside it, where one of the methods reads a model."""
    if not any("model" in method.reads for method in methods):
        return NoMemory()
    from stages.meter.memory import PeakMeter

    return PeakMeter()
