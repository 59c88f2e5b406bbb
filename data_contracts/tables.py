"""The table contracts: every column that passes between stages, once.

`example_id` is 32 hex digits of a 128-bit hash of an example's normalised content. Tables about examples are sorted by
it, so that joins are merges and uniqueness is proved by order. Columns are reproducible: wall times and host facts live
in a payload's *measured* files, never here.
"""

from __future__ import annotations

import pyarrow as pa

from data_contracts.contract import CodeIs, Contract, CountIs, Finite, LengthIs, NotEmpty, OneOf, Within

SPLITS = ("pool", "target", "validation", "holdout")
"""The splits of every run."""
RETENTION = "retention"
"""The split of what a model must not forget, where a run has one."""


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable)


TEXT, INT32, INT64, F32, F64, BOOL = pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()
INT8, BYTES = pa.int8(), pa.binary()
IDS, MASK = pa.list_(pa.field("item", INT32, False)), pa.list_(pa.field("item", BOOL, False))
LIST_F32, LIST_F64 = pa.list_(pa.field("item", F32, False)), pa.list_(pa.field("item", F64, False))

EXAMPLES = Contract(
    "examples",
    1,
    pa.schema(
        [
            _field("example_id", TEXT),
            _field("source", TEXT),  # the group a row belongs to: a dataset, category or file stem
            _field("file", TEXT),  # name of the file as given, never an absolute path
            _field("row", INT64),  # 1-based record in that file
            _field("messages", TEXT),  # JSON list of {role, content, …}; "" for plain text
            _field("tools", TEXT),  # JSON list of tool schemas; "" where there are none
            _field("text", TEXT),  # plain text; "" for chats
            _field("extra", TEXT),  # JSON object of the fields the format does not use
        ]
    ),
    key=("example_id",),
    invariants=(NotEmpty("example_id"), Within("row", 1)),
    about="Normalised rows, free of any tokenizer.",
)

TOKENS = Contract(
    "tokens",
    1,
    pa.schema(
        [
            _field("example_id", TEXT),
            _field("source", TEXT),
            _field("input_ids", IDS),
            _field("answer_mask", MASK),  # True where the token is supervised (predicted from those before it)
            _field("n_tokens", INT32),
            _field("n_answer_tokens", INT32),
            _field("truncated", BOOL),
        ]
    ),
    key=("example_id",),
    invariants=(
        Within("n_tokens", 1),
        Within("n_answer_tokens", 1),
        LengthIs("input_ids", "n_tokens"),
        LengthIs("answer_mask", "n_tokens"),
        CountIs("answer_mask", "n_answer_tokens"),
    ),
    about="Token ids and answer mask of one tokenizer; every row supervises at least one token.",
)

QUARANTINE = Contract(
    "quarantine",
    1,
    pa.schema(
        [
            _field("split", TEXT),
            _field("file", TEXT),
            _field("row", INT64),  # 1-based record in the file; 0 where the whole file is meant
            _field("line", INT64, True),  # 1-based physical line where the record starts, for line formats
            _field("example_id", TEXT, True),
            _field("field", TEXT),  # the field at fault, "" where it is the row
            _field("reason", TEXT),  # a code: bad_json, empty_answer, duplicate, near_duplicate, leak, truncated, …
            _field("detail", TEXT),  # a sentence for people, with value and remedy
        ]
    ),
    invariants=(NotEmpty("reason"), NotEmpty("detail")),
    about="Rows that are not used, each with its reason; counts of used and quarantined rows add up.",
)

SCORES = Contract(
    "scores",
    1,
    pa.schema(
        [
            _field("example_id", TEXT),
            _field("source", TEXT),
            _field("score", F32, True),  # higher is better; null = could not be scored (see the quarantine)
            _field("group_scores", LIST_F32),  # one number a target group, in the order of the record's groups
            _field("loss", F32, True),  # mean loss of an answer token, nats, where the method computed it
            _field("n_tokens", INT32),
            _field("n_answer_tokens", INT32),
            _field("exact", BOOL),  # False where predicted or ranked by another scorer rather than computed
        ]
    ),
    key=("example_id",),
    invariants=(Finite("score"), Finite("group_scores"), Finite("loss"), Within("n_tokens", 1)),
    about="What each pool example is worth for the target.",
)

FEATURES = Contract(
    "features",
    1,
    pa.schema(
        [
            _field("example_id", TEXT),
            _field("bits", INT8),  # a number: 1, 4, 8, 16 or 32
            _field("dimensions", INT32),  # numbers a row
            _field("scale", F32),
            _field("code", BYTES),  # see stages/gradients/quantised.py, which encodes and decodes
        ]
    ),
    key=("example_id",),
    invariants=(
        Within("bits", 1, 32),
        Within("dimensions", 1),
        Finite("scale"),
        Within("scale", 0),
        CodeIs("code", "bits", "dimensions"),
    ),
    about="Gradient features of the pool's examples, quantised; a row that could not be scored has none.",
)

SELECTION = Contract(
    "selection",
    2,
    pa.schema(
        [
            _field("rank", INT32),  # 0 is the best
            _field("example_id", TEXT),
            _field("weight", F32),  # multiplies the example's loss
            _field("repeats", INT32),  # visits an epoch
            _field("order", INT32),  # phase of an epoch: rows of a lower one come first, shuffled among themselves
            _field("mixture", TEXT),  # the part of the mixture it stands for: its source, or "target"
            _field("gain", F32, True),  # the selector's own objective, null where it has none
            _field("reason", TEXT),
        ]
    ),
    key=("rank",),
    invariants=(
        Within("rank", 0),
        Finite("weight"),
        Within("weight", 0),
        Within("repeats", 1),
        Within("order", 0),
        Finite("gain"),
    ),
    least_rows=1,
    about="What to train on, in order of preference, when, and why. An example may stand in several phases.",
)

MIXTURE = Contract(
    "mixture",
    1,
    pa.schema(
        [
            _field("part", TEXT),  # a source of the pool
            _field("rows", INT64),  # of the pool
            _field("tokens", INT64),  # of the pool
            _field("prior", F64),  # its share of the pool, in the selection's unit (rows or tokens)
            _field("share", F64),  # its share of the selection, in the same unit
            _field("phase", INT32),  # of an epoch in which its rows are introduced
            _field("replay", F64),  # rows of earlier phases trained on again in it, for one of its own
            _field("state", F64, True),  # what an online method carries to the next round
        ]
    ),
    key=("part",),
    invariants=(
        *(Within(name, 0, 1) for name in ("prior", "share")),
        *(Within(name, 0) for name in ("phase", "replay")),
        *(Finite(name) for name in ("replay", "state")),
    ),
    least_rows=1,
    about="What share of a selection each part of the pool gets, and when.",
)

REPETITION = Contract(
    "repetition",
    1,
    pa.schema(
        [
            _field("part", TEXT),  # of the mixture; "" where there is none
            _field("rows", INT32),  # k, the first of the ranking
            _field("unique_tokens", INT64),  # U, of one visit of each
            _field("epochs", F64),  # visits of each in a segment, so that the budget is used
            _field("effective_tokens", F64),  # D'(U, epochs): tokens seen once that this is worth
            _field("quality", F64),  # mean gain of the k rows
            _field("value", F64),  # quality times effective tokens
            _field("chosen", BOOL),
        ]
    ),
    key=("part", "rows"),
    invariants=(Within("rows", 1), Within("epochs", 1), Finite("quality"), Finite("value")),
    about="Few rows often or many rows once: what each prefix of the ranking is worth for the budget.",
)

CURVE = Contract(
    "curve",
    2,
    pa.schema(
        [
            _field("step", INT64),  # optimizer steps since the start of the run
            _field("phase", TEXT),  # warmup, stable, decay
            _field("epoch", F64),  # passes over this segment's selection
            _field("tokens", INT64),  # tokens through the model so far in this segment
            _field("flops", INT64),  # counted so far in this segment, evaluation included
            _field("train_loss", F64, True),  # mean over the window's answer tokens, nats
            _field("validation_loss", F64, True),  # mean over validation answer tokens; null where not evaluated
            _field("validation_se", F64, True),  # its standard error, clustered by document
            _field("gradient_norm", F64, True),
            _field("gradient_noise", F64, True),  # tr(Σ)/|G|², tokens; null where not estimated
            _field("learning_rate", F64),  # as used, the guard's factor included
            _field("update_ratio", F64, True),  # norm of the update over that of the weights it moved
            _field("promised_loss", F64, True),  # nats that it would take off were the loss linear
            _field("guard", TEXT),  # regime the step was taken in: stable, watch, stress, recover; off
            _field("guard_scale", F64),  # the guard's factor on the learning rate
            _field("guard_action", TEXT),  # "", slower, tighter clip, skipped, back to step N
        ]
    ),
    key=("step",),
    invariants=(
        Within("step", 0),
        Within("flops", 0),
        OneOf("phase", ("warmup", "stable", "decay")),
        OneOf("guard", ("off", "stable", "watch", "stress", "recover")),
        Within("guard_scale", 0, 1),
    ),
    about="Telemetry by optimizer step. A non-finite loss is recorded as it is: the governor must see it.",
    extra=(  # where the run has a retention set
        _field("retention_loss", F64, True),  # mean over its answer tokens; null where not evaluated
        _field("retention_se", F64, True),  # its standard error, clustered by document
        _field("retention_rise_se", F64, True),  # of its rise above the run's first, document by document
    ),
)

VALIDATION_LOSSES = Contract(
    "validation_losses",
    1,
    pa.schema(
        [
            _field("step", INT64),
            _field("document", INT32),  # row of the tokens evaluated, in their order by example_id
            _field("loss_sum", F64),  # nats over its answer tokens
            _field("answer_tokens", INT32),
        ]
    ),
    key=("step", "document"),
    invariants=(Within("document", 0), Within("answer_tokens", 0)),
    about="One row a document of an evaluation in training: evaluations compare document by document.",
)

EXAMPLE_LOSSES = Contract(
    "example_losses",
    1,
    pa.schema(
        [
            _field("step", INT64),
            _field("position", INT32),  # place in the step's window
            _field("example_id", TEXT),
            _field("loss_sum", F32),  # nats over the example's answer tokens, before the step's update
            _field("answer_tokens", INT32),
        ]
    ),
    key=("step", "position"),
    invariants=(Within("answer_tokens", 1),),
    about="One row a visit of an example.",
)

EXAMPLE_INFLUENCE = Contract(
    "example_influence",
    1,
    pa.schema(
        [
            _field("step", INT64),
            _field("position", INT32),  # place in the step's window
            _field("example_id", TEXT),
            _field("influence", F64),  # ⟨gradient of the row's summed answer loss, D Ḡ⟩, before the step's update
            _field("direction_step", INT64),  # step of the run whose weights and moments made D Ḡ
        ]
    ),
    key=("step", "position"),
    invariants=(Finite("influence"), Within("direction_step", 0)),
    about="One row a visit of an example: what it did for the target; positive lowers the target's loss.",
)

EXAMPLE_CHOICES = Contract(
    "example_choices",
    1,
    pa.schema(
        [
            _field("step", INT64),
            _field("position", INT32),  # place among the step's candidates
            _field("example_id", TEXT),
            _field("chosen", BOOL),  # whether the step trained on it
            _field("weight", F32),  # factor on its loss beside the selection's own; 0 where it was not chosen
            _field("gain", F64, True),  # in the batch selector's objective when it was taken; null where it has none
        ]
    ),
    key=("step", "position"),
    invariants=(Finite("weight"), Within("weight", 0), Finite("gain")),
    about="One row a candidate of a step: which ones the batch selector had it train on.",
)

EVALUATION = Contract(
    "evaluation",
    1,
    pa.schema(
        [
            _field("suite", TEXT),
            _field("model", TEXT),  # base, champion, candidate
            _field("item_id", TEXT),  # bound to the item's content
            _field("source", TEXT),
            _field("score", F64, True),  # higher is better unless the suite says otherwise; null = no evidence
            _field("loss_sum", F64, True),  # nats over answer tokens
            _field("answer_tokens", INT32),
            _field("prediction", TEXT),
            _field("extracted", TEXT, True),  # what the metric read from the prediction; null = nothing extracted
            _field("log_likelihoods", LIST_F64),  # one a choice
            _field("note", TEXT),
        ]
    ),
    key=("suite", "model", "item_id"),
    invariants=(OneOf("model", ("base", "champion", "candidate")), Within("answer_tokens", 0)),
    about="Per-item outcomes, so that models can be compared pair by pair.",
)

CONTAMINATION = Contract(
    "contamination",
    1,
    pa.schema(
        [
            _field("item_id", TEXT),  # the evaluation item
            _field("example_id", TEXT),  # the training example it meets
            _field("kind", TEXT),  # exact, normalised, prompt, ngram
            _field("overlap", F32),  # share of the item's n-grams found, 1.0 for the first three kinds
            _field("detail", TEXT),
        ]
    ),
    key=("item_id", "example_id"),
    invariants=(OneOf("kind", ("exact", "normalised", "prompt", "ngram")), Within("overlap", 0, 1)),
    about="Where what was trained on meets what is evaluated.",
)

TABLES = {
    contract.name: contract
    for contract in (
        EXAMPLES,
        TOKENS,
        QUARANTINE,
        SCORES,
        FEATURES,
        SELECTION,
        MIXTURE,
        REPETITION,
        CURVE,
        VALIDATION_LOSSES,
        EXAMPLE_LOSSES,
        EXAMPLE_INFLUENCE,
        EXAMPLE_CHOICES,
        EVALUATION,
        CONTAMINATION,
    )
}
