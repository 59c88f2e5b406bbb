"""The one configuration: the whole of what a run is asked to do.

It holds the envelope, typed and bounded; each `method` is an opaque mapping that its stage resolves (see `method.py`),
so reading a configuration imports neither torch nor any method. `config.slice(verb)` is what a stage reads and all
that enters its identity. It is read from a file by `config_file.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from data_contracts.cost import Budget, Frozen, Price
from data_contracts.direction import Direction, direction_of
from data_contracts.uri import Uri

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _quantity(units: dict[str, int]) -> BeforeValidator:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
            if match and match[2].lower() in units:
                return float(match[1]) * units[match[2].lower()]
            named = ", ".join(unit for unit in units if unit)
            raise ValueError(f"a number with one of the units {named}" if named else "a number without a unit")
        if isinstance(value, bool):  # True is 1 to Python, and one byte is no budget
            raise ValueError("a number, not true or false")
        return value

    return BeforeValidator(read)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, (str, dict)) else value


Bytes = Annotated[int, Field(le=2**63), BeforeValidator(_whole), _quantity(_BYTES)]
Seconds = Annotated[float, _quantity(_SECONDS)]
Flops = Annotated[int, Field(le=10**30), BeforeValidator(_whole), _quantity({"": 1})]
Money = Annotated[float, _quantity({"": 1})]
Files = Annotated[tuple[str, ...], BeforeValidator(_several)]
MethodSettings = dict[str, Any]


class ModelConfig(Frozen):
    """The base model: a folder (safetensors or GGUF) or a hub name; give one of the two."""

    path: str | None = Field(None, description="Folder of the model, relative to the configuration file.")
    hub: str | None = Field(None, description="Hub name such as HuggingFaceTB/SmolLM2-135M-Instruct.")
    revision: str | None = Field(None, description="Hub commit or tag; resolved to a commit.")

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of `path` and `hub`")
        return self


class DataConfig(Frozen):
    """Where the splits come from. Missing validation and holdout are cut from the target, by task where known."""

    pool: Files = Field(min_length=1, description="Files, folders or hub names of what may be trained on.")
    target: Files = Field(min_length=1, description="What good means: read by scoring.")
    validation: Files = Field((), description="Held back from the target: stops and checkpoints are chosen on it.")
    holdout: Files = Field((), description="Only evaluation touches it.")
    retention: Files = Field(
        (), description="What the model must not forget: its loss is watched in training, none of it is trained on."
    )
    validation_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the target cut off where not given.")
    holdout_fraction: float = Field(0.4, gt=0, lt=1, description="Share of the target cut off where not given.")


class IngestConfig(Frozen):
    """How rows are read, normalised, tokenised and refused."""

    format: Literal["auto", "prompt", "alpaca", "messages", "sharegpt", "text"] = "auto"
    fields: dict[str, str] = Field(default_factory=dict, description="Map of our field names to the file's.")
    roles: dict[str, str] = Field(default_factory=dict, description="Map of the file's speaker names to our roles.")
    source_field: str | None = Field(None, description="Field that names a row's source; else the file's stem.")
    task_field: str | None = Field(None, description="Field that no two splits may share a value of.")
    longest_tokens: int = Field(1024, ge=2, description="Longer rows are truncated (see `truncation`).")
    truncation: Literal["answer_end", "prompt_start", "quarantine"] = Field(
        "answer_end", description="Cut the answer's end, the prompt's start, or refuse the row."
    )
    supervise: Literal["all", "last"] = Field("all", description="Which assistant turns are trained on.")
    system_role: Literal["fold", "refuse"] = Field("fold", description="Where the template refuses a system turn.")
    same_role_twice: Literal["merge", "refuse"] = Field("merge", description="Two turns in a row of one role.")
    response_template: str | None = Field(None, description="Text that starts an answer, for plain-text chats.")
    dedupe: Literal["near", "exact", "none"] = "near"
    near_threshold: float = Field(0.8, gt=0, le=1, description="Jaccard similarity of word 5-grams.")
    longest_row_bytes: Bytes = Field(16 * 2**20, ge=1, description="A longer record is quarantined.")
    resize_embeddings: bool = Field(False, description="Grow the embedding for tokens past its end.")


class BudgetConfig(Frozen):
    """What may be spent; unset is unlimited, but one of flops, seconds, tokens should be set."""

    peak_bytes: Bytes | None = Field(None, ge=1, description="Memory of one worker: 6GB, 80GiB.")
    flops: Flops | None = Field(None, ge=1)
    seconds: Seconds | None = Field(None, gt=0, description="2h, 90min, 3600.")
    tokens: Flops | None = Field(None, ge=1)
    money: Money | None = Field(None, gt=0, description="In the currency of `price`, which it needs.")
    price: Price | None = Field(None, description="What an hour of the machines costs: {hour: 2.4, currency: EUR}.")

    @model_validator(mode="after")
    def _priced(self) -> BudgetConfig:
        if self.money is not None and (self.price is None or not any((self.price.hour, *self.price.stages.values()))):
            raise ValueError("`money` limits nothing where no work has a price: set `price: {hour: …}` beside it")
        if self.price is not None:
            unknown = sorted(set(self.price.stages) - set(SLICES))
            if unknown:
                raise ValueError(f"`price.stages` names {unknown[0]!r}, which is no stage: {', '.join(SLICES)}")
        return self

    @property
    def limits(self) -> Budget:
        """The limits alone."""
        return Budget(**self.model_dump(exclude={"price"}))


class BeginConfig(Frozen):
    """The charged warm-up on a random selection."""

    fraction: float = Field(0.05, gt=0, le=1, description="Share of the pool's rows.")
    least_rows: int = Field(8, ge=1)
    start: Literal["anew", "warm_up", "latest"] = Field(
        "anew",
        description="Where a run begins whose data changed since the run before it: at the base; at that run's "
        "warm-up, so that rows scored with it stand; at the best that it trained (docs/governor.md).",
    )


Saving = Literal[
    "recompute",
    "chunked_loss",
    "update_in_backward",
    "states_8bit",
    "states_4bit",
    "states_mini",
    "shard",
    "offload_states",
    "offload_activations",
]


class PlanConfig(Frozen):
    """Which ways of training may be chosen."""

    techniques: tuple[MethodSettings, ...] = Field(
        ({"method": "full"}, {"method": "lora"}), min_length=1, description="In order of preference."
    )
    micro_batches: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (8, 4, 2, 1), min_length=1, description="Examples a pass; the largest are tried first."
    )
    window: int = Field(
        8, ge=1, description="Examples an optimizer step, all workers; rounded up to whole micro-batches on each."
    )
    precision: Literal["auto", "any", "float32", "bfloat16"] = Field(
        "auto",
        description="auto is the device's own; any also takes the other one and, below adapters, frozen weights in "
        "four bits, each where nothing before it fits.",
    )
    packed: bool = Field(False, description="Pack several examples into one row.")
    headroom: float = Field(0.1, ge=0, lt=1, description="Share of the memory budget left free.")
    savings: tuple[Saving, ...] = Field(
        (
            "recompute",
            "chunked_loss",
            "update_in_backward",
            "states_8bit",
            "shard",
            "offload_states",
            "offload_activations",
        ),
        description="What may be used where memory is short (docs/memory.md); `states_8bit` asks for bitsandbytes, "
        "`shard` for several workers, what is offloaded for an accelerator; `states_4bit` and `states_mini` are used "
        "only where they are named.",
    )


class ScoreConfig(Frozen):
    """How the pool is scored: a method, how many rows it computes itself, and how its groups are put together."""

    scorer: MethodSettings = Field(default_factory=lambda: {"method": "influence"})
    coverage: MethodSettings = Field(
        default_factory=lambda: {"method": "full"}, description="Which rows the scorer computes; docs/scoring.md."
    )
    groups: Literal["all", "source"] = Field("all", description="One target group, or one a target source.")
    combine: Literal["mean", "max"] = Field("mean", description="How group scores become one.")
    batch_tokens: int = Field(4096, ge=1, description="Tokens a forward+backward.")
    workers: int = Field(
        1, ge=1, description="Processes that score by a model: 1 is this one, more run under Ray. Not what comes out."
    )


class SelectConfig(Frozen):
    """How many examples are chosen, and by which selector. Give one of fraction, count, tokens."""

    selector: MethodSettings = Field(default_factory=lambda: {"method": "top_k"})
    fraction: float | None = Field(None, gt=0, le=1, description="Of the pool's rows.")
    count: int | None = Field(None, ge=0, description="Rows; 0 with `include_target` trains on the target alone.")
    tokens: int | None = Field(None, ge=1)
    include_target: bool = Field(False, description="Whether every target row is trained on too.")
    mixture: MethodSettings | None = Field(
        None, description="What share of the selection each source of the pool gets, and when; unset: as it comes."
    )
    repetition: MethodSettings | None = Field(
        None, description="Law by which fewer rows are trained on more often; unset: each row once a pass."
    )
    noise: MethodSettings | None = Field(
        None, description="A filter whose suspects no selector sees: {method: answer_fit}; docs/selection.md."
    )

    @model_validator(mode="after")
    def _one(self) -> SelectConfig:
        if sum(value is not None for value in (self.fraction, self.count, self.tokens)) > 1:
            raise ValueError("give one of `fraction`, `count`, `tokens`")
        if self.count == 0 and not self.include_target:
            raise ValueError("`count: 0` leaves nothing to train on: set `include_target`, or a count of at least 1")
        return self


class GuardConfig(Frozen):
    """What training does by itself where a loss, a gradient or an update is far from what is usual."""

    least_rate: float = Field(0.1, ge=0.01, le=1, description="Least factor on the learning rate.")
    patience: int = Field(2, ge=1, le=100, description="Alarms in a row after which an earlier state is put back.")
    calm_windows: int = Field(5, ge=1, le=1000, description="Windows without a sign before trouble counts as over.")
    wait_windows: int = Field(
        200, ge=1, description="Calm windows before a rate that was cut for good is doubled; twice as many each time."
    )
    states: int = Field(
        2, ge=1, le=20, description="Earlier states kept: the start, then snapshots, one every `snapshot_steps`."
    )


class TrainConfig(Frozen):
    """The optimizer, the schedule and the checkpoints. The plan decides technique and batch."""

    learning_rate: float | None = Field(None, gt=0, description="Peak; unset is the technique's own.")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    epochs: float = Field(1.0, gt=0, description="Passes over the selection in one segment.")
    warmup_steps: int = Field(4, ge=0, description="Linear warm-up, at the run's start.")
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    decay_share: float = Field(
        0.15, gt=0, le=1, description="Share of a run's steps that end in a decay when it anneals or closes."
    )
    segment_flops: Flops | None = Field(
        None, ge=1, description="Most that a segment may spend, evaluation included; unset leaves it to the governor."
    )
    evaluations: int = Field(
        8, ge=1, description="Validation evaluations a segment; the default policy reads six of them."
    )
    validation_rows: int | None = Field(
        None, ge=1, description="Most rows of validation, and of retention, used; unset is all."
    )
    snapshot_steps: int = Field(50, ge=1, description="Optimizer steps between resume snapshots.")
    drop_last: bool = False
    influence: Literal["segment", "evaluation"] | None = Field(
        None,
        description="Note the influence of every visited row on the target (table `example_influence`), along a "
        "direction made at the segment's start, or again at each evaluation; unset does not.",
    )
    batch_selector: MethodSettings | None = Field(
        None,
        description="Draw more rows than a window trains on and choose among them at every step: {method: greats} or "
        "{method: colm}; docs/selection.md. Unset trains on every row drawn.",
    )
    guard: GuardConfig | None = Field(default_factory=GuardConfig, description="Null trains without one.")
    probe: bool = Field(
        False,
        description="Whether a segment tries a way of choosing, as a race sets it: all it costs is then a probe's.",
    )
    workers: int = Field(0, ge=0, description="Ray Train workers; 0 is in this process.")


class GovernConfig(Frozen):
    """When to stop, re-select or anneal."""

    policy: MethodSettings = Field(
        default_factory=lambda: {"method": "gain_left"},
        description="When to go on, choose anew, anneal or stop: asha, fixed_rounds, gain_left, marginal_gain, "
        "median_stop, patience or share_past_best, each with its settings (docs/governor.md).",
    )
    rounds: int = Field(3, ge=1, description="Most turns of the loop.")
    metric: str = "validation_loss"
    direction: Direction | None = Field(None, description="Unset: told from the metric's name where that is certain.")
    evaluation_share: float = Field(0.05, ge=0, lt=1, description="Share of the budget kept for the final evaluation.")
    most_forgotten_nats: float | None = Field(
        None,
        ge=0,
        description="How far the loss on `data.retention` may rise above where the run began: beyond it, and beyond "
        "error, training ends and no checkpoint counts. Unset: it is watched and ends nothing.",
    )
    hysteresis: float = Field(
        0.1, ge=0, description="How much more a FLOP a new plan must bring than the one in force (docs/governor.md)."
    )

    @model_validator(mode="after")
    def _directed(self) -> GovernConfig:
        direction_of(self.metric, self.direction)  # refused here, before anything is trained
        return self


class ArmConfig(Frozen):
    """One way of choosing: how rows are scored, which are taken, and how often each is trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")
    scorer: MethodSettings = Field(default_factory=lambda: {"method": "random"})
    coverage: MethodSettings = Field(default_factory=lambda: {"method": "full"})
    selector: MethodSettings = Field(default_factory=lambda: {"method": "top_k"})
    epochs: float = Field(4.0, gt=0, description="Most visits of a chosen row that the rest of the budget should make.")
    kind: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the pool that is of the target's kind: so much is chosen, and visited up to `epochs` "
        "times before others are; unset: what words tell, or a tenth.",
    )
    fraction: float | None = Field(
        None, gt=0, le=1, description="Of the pool's rows, whatever `kind` is; unset follows from the budget."
    )
    passes: float = Field(
        0.0,
        ge=0,
        description="What scoring a row costs, in trainings on it: 1 for gradients, 0.34 for losses, 0 for text. "
        "Above 0, the probe scores a sample of the pool.",
    )


def _arm(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in ARMS:
        raise ValueError(f"one of {', '.join(ARMS)}, or an arm's own settings")
    return ARMS[value]


ARMS: dict[str, dict[str, Any]] = {
    "random": {"name": "random", "selector": {"method": "random"}, "epochs": 1.0},
    "bm25": {"name": "bm25", "scorer": {"method": "bm25"}},
    "cascade": {
        "name": "cascade",
        "scorer": {"method": "influence"},
        "coverage": {"method": "cascade", "filters": [{"method": "bm25", "keep": 0.4}]},
        "passes": 1.0,
    },
    "influence": {"name": "influence", "scorer": {"method": "influence"}, "passes": 1.0},
}
"""The arms that have a name of their own."""

Arm = Annotated[ArmConfig, BeforeValidator(_arm)]


class AutoConfig(Frozen):
    """Try several ways of choosing by short trainings before one is paid for; the first arm is the one to beat."""

    arms: tuple[Arm, ...] = Field(
        (),
        max_length=16,
        description="By name (random, bm25, cascade, influence) or settings. One is used untried; none: `auto` is off.",
    )
    probe_share: float = Field(0.02, gt=0, le=0.2, description="What an arm's probe trains, of what may be spent.")
    most_probes: float = Field(
        0.03,
        gt=0,
        le=1,
        description="All probes, with what dear arms score for them, take no more of what may be spent: else they are "
        "shorter, down to `least_steps`; then dear arms are left out, then all.",
    )
    sample: float = Field(0.2, gt=0, le=1, description="Share of the pool that the probe of a dear arm scores.")
    most_price: float = Field(
        0.5,
        gt=0,
        le=1,
        description="An arm whose choosing takes a larger share of what may be spent is not tried.",
    )
    least_steps: int = Field(4, ge=1, description="A probe of fewer steps tells nothing.")
    confidence: float = Field(0.8, ge=0.5, lt=1, description="Share of resamples in which an arm must beat the first.")

    @model_validator(mode="after")
    def _named(self) -> AutoConfig:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"each arm has a name of its own, they are {', '.join(names)}")
        return self


class EvaluateConfig(Frozen):
    """Which tasks judge the models."""

    tasks: tuple[MethodSettings, ...] = Field(({"method": "perplexity"},), min_length=1)


class JudgeConfig(Frozen):
    """Which gates must pass."""

    gates: tuple[MethodSettings, ...] = Field(
        ({"method": "better_than_base"}, {"method": "better_than_champion"}, {"method": "contamination"}), min_length=1
    )


class PromoteConfig(Frozen):
    """Where a promoted model goes."""

    registered_model: str = "lazytrain"
    alias: str = "champion"


class StoreConfig(Frozen):
    """Where state lives; the default keeps everything under one folder."""

    home: str = Field(".lazytrain", description="Folder of the embedded store, relative to the configuration file.")
    tracking_uri: Uri | None = Field(None, description="MLflow; unset is SQLite under `home`.")
    work_uri: Uri | None = Field(None, description="Snapshots and shards of attempts; unset is under `home`.")


class Config(Frozen):
    """A run: model, data, what good means, what may be spent, and how each stage does its part."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelConfig
    data: DataConfig
    budget: BudgetConfig = BudgetConfig()
    ingest: IngestConfig = IngestConfig()
    begin: BeginConfig = BeginConfig()
    plan: PlanConfig = PlanConfig()
    score: ScoreConfig = ScoreConfig()
    select: SelectConfig = SelectConfig(fraction=0.1)
    train: TrainConfig = TrainConfig()
    govern: GovernConfig = GovernConfig()
    auto: AutoConfig = AutoConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    judge: JudgeConfig = JudgeConfig()
    promote: PromoteConfig = PromoteConfig()
    store: StoreConfig = StoreConfig()

    @model_validator(mode="after")
    def _retains(self) -> Config:
        if self.govern.most_forgotten_nats is not None and not self.data.retention:
            raise ValueError("`govern.most_forgotten_nats` limits nothing without `data.retention`: give its files")
        return self

    def slice(self, verb: str) -> dict[str, Any]:
        """Return what stage `verb` reads, as plain JSON data: all that enters its identity from the configuration."""
        sections = SLICES[verb]
        return {name: _json(getattr(self, name)) for name in sections}


def _json(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Frozen) else value


SLICES: dict[str, tuple[str, ...]] = {
    "ingest": ("seed", "model", "data", "ingest"),
    "plan": ("seed", "budget", "plan", "train"),
    "begin": ("seed", "begin", "train"),
    "score": ("seed", "score"),
    "mix": ("seed", "select", "train"),
    "select": ("seed", "select", "train"),
    "train": ("seed", "train", "govern"),
    "govern": ("budget", "govern", "train"),
    "weigh": ("seed", "auto"),
    "quote": ("budget", "score", "select", "govern", "auto"),
    "evaluate": ("seed", "evaluate"),
    "judge": ("judge",),
    "promote": ("promote",),
}
