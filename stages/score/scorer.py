"""The family of scorers: a method says what it reads, prepares once, and gives numbers for blocks of examples.

The engine around it streams the pool, buckets by length, isolates what fails, quarantines what is not finite, counts
operations and resumes; so a method file is only its mathematics. This module imports no torch: a scorer that reads no
model runs without it. Shapes: B examples of a block, J columns (one a target group, or one), N examples of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from data_contracts.method import Method
from stages.gradients.quantised import Quantiser

if TYPE_CHECKING:
    import torch

    from data_contracts.records import Plan
    from stages.model.batch import TokenBatch, TokenTable
    from stages.model.checkpoint import TrainedModel

Reads = Literal["text", "tokens", "model", "moments", "example_losses", "checkpoints", "reference"]


class Meter:
    """Counts the operations and tokens that scoring spends; without a model there are none but those added."""

    flops = 0
    tokens = 0

    def forward(self, batch: TokenBatch) -> None:
        """Count one forward pass over `batch`."""

    def decoder(self, batch: TokenBatch) -> None:
        """Count one forward pass over `batch` that stops before the output head."""

    def train(self, batch: TokenBatch) -> None:
        """Count one forward and backward pass over `batch`."""

    def add(self, flops: int) -> None:
        """Count other operations."""
        self.flops += flops


@dataclass(frozen=True)
class Given:
    """What the engine hands to `prepare`; what a method does not list in `reads` is None or empty.

    Attributes:
        seed: 63-bit, from the configuration alone.
        target: the target's tokens, for a grouped method that reads tokens or a model; `groups` names the target groups
            and `members` holds each one's row numbers.
        target_texts: the texts of the same rows, for a grouped method that reads text.
        trained: the model (evaluation mode, on `device`), its moments and trainer record; parameters that were trained
            have `requires_grad`. Without a checkpoint: the base, all its parameters, no moments.
        checkpoints: every checkpoint given, oldest first, `trained` among them, for a method that reads several.
        reference: a second checkpoint of the same base, for a method that compares with it.
        autocast: dtype of forward passes where the plan asks for one that the weights do not have.
        plan: how training fits, and in what memory; None: nothing was planned.
        pool_rows: rows of the pool.
        batch_tokens: most padded tokens in one forward (and backward) pass.
        examples: the pool's examples, mapped, for a method that reads text.
        example_losses: folders of the losses met in training, oldest first.
        notice: tells the user something once.
        resources: what is entered here is closed when scoring ends, whatever happens.
        facts: what preparing found out, for the summary; plain numbers and text.
    """

    seed: int
    pool_rows: int
    batch_tokens: int
    meter: Meter
    notice: Callable[[str], None]
    resources: ExitStack
    groups: tuple[str, ...] = ()
    members: tuple[np.ndarray, ...] = ()
    target: TokenTable | None = None
    target_texts: Sequence[str] = ()
    device: str = "cpu"
    trained: TrainedModel | None = None
    checkpoints: Sequence[TrainedModel] = ()
    reference: TrainedModel | None = None
    autocast: torch.dtype | None = None
    plan: Plan | None = None
    examples: pa.Table | None = None
    example_losses: Sequence[Path] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """One example's quantised feature, as the contract `features` has it."""

    bits: int
    dimensions: int
    scale: float
    code: bytes


@dataclass(frozen=True)
class Block:
    """Some examples of the pool: ids and lengths always, the rest as the method's `reads` asks.

    `batch` holds one document an example in the same order, on the device. A method that computed the examples' losses
    anyway leaves them with `note_losses`, one that makes features with `note_features`.
    """

    example_ids: list[str]
    lengths_B: np.ndarray
    answer_lengths_B: np.ndarray
    meter: Meter
    batch: TokenBatch | None = None
    texts: list[str] | None = None
    losses: dict[str, np.ndarray] = field(default_factory=dict)
    features: list[Feature] = field(default_factory=list)
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)

    def refuse(self, index: int, reason: str, detail: str) -> None:
        """Say why the example at `index` is given NaN: a code, and a sentence for the quarantine."""
        self.refused[index] = reason, detail

    def note_losses(self, loss_sum_B: Any, answer_tokens_B: Any) -> None:
        """Leave the summed answer losses (nats) and the number of tokens they are over."""
        self.losses["sum"] = np.asarray(loss_sum_B.cpu(), dtype=np.float64)
        self.losses["tokens"] = np.asarray(answer_tokens_B.cpu(), dtype=np.int64)

    def note_features(self, quantiser: Quantiser, feature_BK: np.ndarray) -> None:
        """Leave the examples' features, to be stored as `quantiser` encodes them."""
        code_BU, scale_B = quantiser.encode(feature_BK)
        self.features.extend(
            Feature(quantiser.bits, quantiser.dimensions, float(scale), code.tobytes())
            for code, scale in zip(code_BU, scale_B, strict=True)
        )

    @property
    def mean_loss(self) -> np.ndarray:
        """Mean loss an answer token, float64; NaN where unknown or where nothing is predicted."""
        missing = np.full(len(self.example_ids), np.nan)
        if not self.losses:
            return missing
        tokens = self.losses["tokens"]
        return np.divide(self.losses["sum"], tokens, out=missing, where=tokens > 0)

    @property
    def tokens(self) -> TokenBatch:
        """The block's token batch, for a method that reads tokens."""
        assert self.batch is not None, "the method does not list `tokens` in `reads`"
        return self.batch


class Scorer(Method):
    """One way of saying what an example is worth. Higher is better."""

    family: ClassVar[str] = "scorers"
    home: ClassVar[str] = "stages.score.methods"
    reads: ClassVar[frozenset[Reads]] = frozenset()
    """What the engine must supply; a method that lists neither `model` nor `tokens` needs no torch."""
    passes: ClassVar[Literal["none", "decoder", "forward", "train"]] = "none"
    """What one block costs: the engine counts a forward pass of the block's batch (`decoder`: one that stops before the
    output head), or forward and backward."""
    grouped: ClassVar[bool] = False
    """Whether it gives one column a target group rather than one in all."""
    second_pass: ClassVar[bool] = False
    """Whether scores come of the stored features of the whole pool: see `gather` and `rescore`."""

    @property
    def keeps_features(self) -> bool:
        """Whether the features that `score` left with its blocks become the stage's output `features`."""
        return False

    def prepare(self, given: Given) -> Any:
        """Make what `score` needs, once a worker."""
        return None

    def score(self, block: Block, state: Any) -> np.ndarray:
        """Return score_BJ (or score_B), one row an example; NaN for an example that cannot be scored."""
        raise TypeError(f"{type(self).__name__} defines no score")

    def suspicion(self, score_N: np.ndarray) -> np.ndarray | None:
        """Return how suspicious each row looks where the scores are self-influence (larger is more); None elsewhere."""
        return None

    def gather(self, features: Iterable[np.ndarray], state: Any) -> Any:
        """After all blocks, make what `rescore` needs from the pool's features, a part feature_BK at a time."""
        raise TypeError(f"{type(self).__name__} defines no gather")

    def rescore(self, feature_BK: np.ndarray, first_BJ: np.ndarray, gathered: Any) -> np.ndarray:
        """Return score_BJ from the features of some examples and the columns that `score` gave them."""
        raise TypeError(f"{type(self).__name__} defines no rescore")

    def finish(self, score_N: np.ndarray) -> np.ndarray:
        """Return the final scores from all of the pool's (float32, NaN where there is none); here: as they are."""
        return score_N

    @classmethod
    def regime(cls, rows: int, groups: int, plan: Plan | None) -> str:
        """Return how a pool of so many rows is scored for so many target groups, where that hangs on these or on the
        plan's memory: scored rows are taken over within one regime alone."""
        return ""

    @classmethod
    def pointwise(cls) -> bool:
        """Return whether what `score` says of a row does not depend on what else is in the pool (`finish` may).

        Rows that were scored before are then taken over when the pool grows.
        """
        return True
