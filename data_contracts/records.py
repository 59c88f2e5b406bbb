"""Records: the small JSON values that pass between stages, the runner and the flows.

All are immutable and hold no absolute path, no secret and no tensor. A record that is a stage's output names other
artifacts by digest, never by the run that made them, so that it is the same whoever made them; it has a
`RecordContract` at the end of this file. `Ref`, `Manifest`, `Request` and `Result` carry the work itself.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from data_contracts.contract import AnyContract, FolderContract, RecordContract
from data_contracts.cost import Budget, Cost, Frozen
from data_contracts.quotes import Quote
from data_contracts.tables import TABLES
from data_contracts.uri import Uri

MANIFEST_FILE, RECORD_FILE, MEASURED = "manifest.json", "record.json", "measured"
OUTSIDE_FILE = "outside"
"""In an attempt's scratch, the path of a temporary folder elsewhere that goes when the scratch goes."""
OUTSIDE_PREFIX = "lt-"
"""How the name of such a folder begins; no other is removed."""


class Ref(Frozen):
    """Where a committed artifact is and what it must be."""

    contract: str = Field(description="Contract id, such as scores/1.")
    run: str = Field(description="MLflow run of the attempt that made it.")
    path: str = Field(description="Folder relative to that run's artifacts: the output's name.")
    digest: str = Field(description="sha256 over its content files and contract id.")
    rows: int = Field(0, ge=0)
    bytes: int = Field(0, ge=0, description="Of its content files.")


class FileEntry(Frozen):
    """One file of a payload."""

    path: str = Field(description="Relative to the output's folder, with / between parts.")
    bytes: int = Field(ge=0)
    sha256: str


class Output(Frozen):
    """One output of an attempt: its reference and its files."""

    ref: Ref
    content: tuple[FileEntry, ...]
    measured: tuple[FileEntry, ...] = ()


class Table(Frozen):
    """A small table of a summary."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | bool | None, ...], ...]


class Summary(Frozen):
    """What a stage says about its work: one value, rendered by rich, Prefect and HTML alike."""

    title: str
    facts: dict[str, str | int | float | bool | None] = Field(default_factory=dict, description="Reproducible.")
    measured: dict[str, str | int | float | bool | None] = Field(default_factory=dict, description="Of this attempt.")
    tables: tuple[Table, ...] = ()
    notices: tuple[str, ...] = ()


class Origin(Frozen):
    """Who asked for an attempt; recorded, never part of an identity."""

    run: str | None = Field(None, description="MLflow run of the pipeline run, parent of its attempts.")
    name: str = Field("", description="As shown: score, train-round-2.")
    round: int | None = None


class StoreAddress(Frozen):
    """How to reach the store; recorded, never part of an identity."""

    tracking_uri: Uri
    work_uri: Uri
    experiment: str = "lazytrain"
    artifact_uri: Uri | None = Field(None, description="Root for a new local experiment's artifacts.")


class Request(Frozen):
    """All that a runner needs to do one stage's work, anywhere."""

    verb: str
    config: dict[str, Any] = Field(default_factory=dict, description="The slice that the stage reads.")
    inputs: dict[str, tuple[Ref, ...]] = Field(default_factory=dict)
    store: StoreAddress
    origin: Origin = Origin()
    knobs: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="How it is done, not what comes out: progress, batch of work, log level."
    )
    refresh: bool = Field(False, description="Make a new attempt even where a commit exists.")


class Manifest(Frozen):
    """Written last into an attempt's artifacts: without it there is no artifact."""

    version: Literal[1] = 1
    stage: str
    stage_version: str
    identity: str
    run: str
    config: dict[str, Any]
    inputs: dict[str, tuple[Ref, ...]]
    outputs: dict[str, Output]
    costs: dict[str, Cost] = Field(description="By cause.")
    summary: Summary
    libraries: dict[str, str] = Field(default_factory=dict, description="Versions that affect results.")
    environment: dict[str, Any] = Field(default_factory=dict, description="Host, device, image, commit; measured.")


class Result(Frozen):
    """What a runner answers; under 10 kB, the only thing that passes through Prefect."""

    stage: str
    identity: str
    run: str
    cached: bool
    refs: dict[str, Ref]
    costs: dict[str, Cost] = Field(
        default_factory=dict, description="At the manifest, by cause; spent now if not cached."
    )

    def ref(self, name: str) -> tuple[Ref, ...]:
        """Return one output as the tuple that a request's inputs hold; empty where the stage did not make it."""
        return (self.refs[name],) if name in self.refs else ()


class ModelPin(Frozen):
    """A base model named by content: where it was found and what its files must be."""

    source: str = Field(description="Hub name, or the folder's name; never an absolute path.")
    locator: str = Field(description="How it is found again: hub:name@commit; a folder in memory, empty in the record.")
    digest: str
    architecture: str
    parameters: int = Field(ge=0)
    layers: int = Field(ge=0)
    hidden: int = Field(ge=0)
    vocabulary: int = Field(ge=0, description="Rows of the embedding.")
    tied_embeddings: bool
    longest: int = Field(ge=1, description="Positions the model was made for.")
    tokenizer_digest: str
    files: tuple[FileEntry, ...]
    grown_vocabulary: int = Field(0, ge=0, description="Rows the embedding is grown to on loading; 0 leaves it.")


class MemoryUse(Frozen):
    """What a segment of training really held beside what its plan had predicted; measured, and no part of a digest."""

    device: str
    predicted_bytes: int
    allowed_bytes: int | None = Field(description="The budget's less headroom; None is unlimited.")
    measured_bytes: int = Field(description="Most of any step: the process's resident size, or what CUDA allocated.")
    ran_out: bool = Field(
        description="Whether memory ran out in a step, which was then made with smaller micro-batches."
    )

    @property
    def past(self) -> int:
        """Bytes held past the prediction; less than 0 where fewer were held."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def broke(self) -> bool:
        """Whether more was held than was allowed, or than there was."""
        return self.ran_out or (self.allowed_bytes is not None and self.measured_bytes > self.allowed_bytes)


class Plan(Frozen):
    """How training fits: the chosen combination, what it is predicted to need, and the runners-up."""

    technique: dict[str, Any] = Field(description="Opaque method mapping: {method: lora, …}.")
    precision: Literal["float32", "bfloat16"]
    micro_batch: int = Field(ge=1, description="Examples (or packed rows) in one forward+backward of one worker.")
    accumulation: int = Field(ge=1, description="Micro-batches an optimizer step on one worker.")
    packed: bool
    row_tokens: int = Field(ge=1, description="Tokens of the longest row planned for.")
    recomputed_blocks: tuple[int, ...] = Field(
        (), description="Decoder blocks (from 0) whose activations the backward pass computes again."
    )
    optimizer_states: Literal["float32", "8bit", "4bit", "mini", "host"] = Field(
        "float32",
        description="In which the moments are held; mini is one second moment a block, host is float32 in main memory.",
    )
    offload_activations: bool = Field(False, description="Whether activations wait in main memory.")
    loss_chunks: int = Field(1, ge=1, description="Parts in which a micro-batch goes through the output head.")
    update_in_backward: bool = Field(False, description="Whether one parameter's gradient is held at a time.")
    window: int | None = Field(None, ge=1, description="Examples an optimizer step that the configuration asks for.")
    answer_tokens: float | None = Field(None, gt=0, description="Mean of a row of the pool.")
    workers: int = Field(0, ge=0, description="0 is in this process.")
    sharded: bool = Field(False, description="Whether weights, gradients and moments are spread over the workers.")
    trainable: int = Field(ge=0)
    peak_bytes: int = Field(ge=0, description="Predicted, largest phase.")
    phases: dict[str, int] = Field(description="Predicted bytes by phase.")
    limit_bytes: int | None = Field(None, description="Memory of one worker that the budget allows; None is unlimited.")
    allowed_bytes: int | None = Field(
        None, description="Memory that may be taken: the budget's less headroom and `residual_bytes`."
    )
    residual_bytes: int = Field(
        0, ge=0, description="What earlier segments held past predictions, where that broke what was allowed."
    )
    ran_out_bytes: int | None = Field(
        None,
        description="Least prediction of a way that memory ran out in; None where it never did, or nothing else fits.",
    )
    score_bytes: dict[str, int] = Field(
        default_factory=dict,
        description="Predicted for influence of the longest row alone on one target group, by its form: backward, "
        "forward. Empty where memory has no limit.",
    )
    flops_per_token: int = Field(ge=0, description="Training: forward+backward.")
    flops_per_token_forward: int = Field(ge=0)
    pass_flops: int = Field(ge=0, description="Predicted for training once on every row of the pool.")
    tokens_per_second: float = Field(
        0.0, ge=0, description="Modelled, not timed, for rows of the longest row's length, over all workers."
    )
    why: str
    considered: tuple[dict[str, Any], ...] = Field((), description="Every way that was priced, best first.")

    def backward_bytes(self, groups: int) -> int:
        """Return the memory that influence on so many target groups needs, row by row, with activations kept."""
        return self.score_bytes.get("backward", 0) + 4 * (groups - 1) * self.trainable

    def short_of_memory(self, groups: int) -> bool:
        """Whether that exceeds what is allowed, and the forward form, which keeps no activations, needs less."""
        if self.allowed_bytes is None or not self.score_bytes or self.backward_bytes(groups) <= self.allowed_bytes:
            return False
        return self.score_bytes["forward"] < self.score_bytes["backward"]


class Decision(Frozen):
    """What the governor decided, with every number it was made from."""

    action: Literal["continue", "reselect", "remix", "reallocate", "anneal", "stop"]
    reason: str
    round: int = Field(ge=0)
    replans: bool = False
    closes: bool = Field(False, description="Whether the next segment is the closing decay alone.")
    best: str | None = Field(
        None, description="Digest of the checkpoint of the lowest validation loss that may be kept."
    )
    best_step: int | None = None
    best_loss: float | None = None
    non_finite_steps: tuple[int, ...] = ()
    direction: Literal["minimise", "maximise"] = "minimise"
    segment_flops: int | None = Field(None, description="Most that the next segment may spend.")
    remaining: Budget = Budget()
    numbers: dict[str, float | int | str | bool | None] = Field(default_factory=dict)

    @property
    def stops(self) -> bool:
        """Whether the loop ends."""
        return self.action == "stop"

    @property
    def anneals(self) -> bool:
        """Whether the next segment decays the learning rate to its end."""
        return self.action == "anneal"

    @property
    def rescores(self) -> bool:
        """Whether the pool is scored again."""
        return self.action == "reselect"

    @property
    def reselects(self) -> bool:
        """Whether a new selection is made."""
        return self.action in ("reselect", "remix")


class Likeness(Frozen):
    """How many rows are of the target's kind, told from their words: among the chosen, and in the pool."""

    chosen: float = Field(ge=0, le=1, description="Share of the chosen rows that is of the kind.")
    pool: float = Field(ge=0, le=1, description="Share of the pool that is of the kind: what chance would take.")
    moved: float = Field(ge=-1, le=1, description="`chosen` less `pool`: visits that go to rows of the kind instead.")
    low: float = Field(ge=-1, le=1, description="Lower end of the 90 % interval of `moved`.")
    high: float = Field(ge=-1, le=1, description="Its upper end.")
    reference_rows: int = Field(ge=1, description="Rows of the kind that were compared with.")


class WeighedArm(Frozen):
    """What trying one way of choosing showed, and what it is expected to reach."""

    name: str
    fraction: float = Field(gt=0, le=1, description="Of the pool's rows, chosen for the rest of the budget.")
    price_flops: int = Field(ge=0, description="Choosing this way from the whole pool, from here on.")
    spent_flops: int = Field(ge=0, description="On choosing for the probe and on its training.")
    probe_flops: int = Field(ge=1, description="Of its probe's training.")
    probe_loss: float = Field(description="Validation loss at the probe's end, nats an answer token.")
    probe_se: float = Field(ge=0, description="Its standard error, documents drawn again.")
    training_flops: int = Field(ge=0, description="Left to train with, the probe included.")
    expected_loss: float
    low: float
    high: float
    gain: float = Field(description="Expected loss of the arm to beat less this one's, nats.")
    gain_low: float = Field(description="Lower end of its 80 % interval.")
    gain_high: float = Field(description="Its upper end.")
    probability: float = Field(ge=0, le=1, description="That it ends below the arm to beat.")
    reuses: float | None = Field(None, description="Uses of one choice until it has paid; None: never.")


class Weighing(Frozen):
    """Which way of choosing pays here, with every number it was decided from."""

    chosen: str
    reason: str
    start_loss: float
    spendable_flops: int
    arms: tuple[WeighedArm, ...] = Field(min_length=1)
    failed: tuple[str, ...] = Field((), description="Arms whose probe's loss was not finite.")


class Finding(Frozen):
    """What one gate found."""

    gate: str
    passed: bool
    reason: str
    numbers: dict[str, float | int | str | bool | None] = Field(default_factory=dict)


class Verdict(Frozen):
    """Whether the candidate may be promoted, and on what evidence. Pure: the same evidence gives the same verdict."""

    outcome: Literal["promote", "hold", "reject"]
    reason: str
    candidate: str | None = Field(description="Digest of the checkpoint judged.")
    champion: str | None = Field(
        None, description="Digest of the champion compared with; promotion moves the alias only off it."
    )
    findings: tuple[Finding, ...]
    numbers: dict[str, float | int | str | bool | None] = Field(default_factory=dict)


class Promotion(Frozen):
    """What the promote effect did: the alias before and after, or why nothing moved."""

    outcome: Literal["promoted", "held", "rejected"]
    reason: str
    registered_model: str
    alias: str
    version: int | None = None
    previous_version: int | None = None
    decision_digest: str


RECORDS = {
    contract.name: contract
    for contract in (
        RecordContract("base", 1, ModelPin, "The base model, pinned by digest."),
        RecordContract("plan", 2, Plan, "How training fits."),
        RecordContract("decision", 2, Decision, "What the governor decided."),
        RecordContract("likeness", 1, Likeness, "How many rows are of the target's kind."),
        RecordContract("weighing", 2, Weighing, "Which way of choosing pays."),
        RecordContract("quote", 1, Quote, "What a run is expected to come to."),
        RecordContract("verdict", 2, Verdict, "Whether the result may be promoted."),
        RecordContract("promotion", 1, Promotion, "What promotion did."),
    )
}
CHECKPOINT = FolderContract(
    "checkpoint",
    1,
    needs=("trainer.json", "optimizer.safetensors"),
    about="A committed model with its optimizer moments: safetensors only.",
)
CONTRACTS: dict[str, AnyContract] = {**TABLES, **RECORDS, CHECKPOINT.name: CHECKPOINT}


def contract_of(contract_id: str) -> AnyContract:
    """Return the contract called `name/version`. Raises KeyError for one this version of the project does not know."""
    name, _, version = contract_id.partition("/")
    contract = CONTRACTS[name]
    if str(contract.version) != version:
        raise KeyError(contract_id)
    return contract
