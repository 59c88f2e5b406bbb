"""The engine of mixing: counts the pool's parts, gives a mixture what it reads, writes and says what it made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.arrow import TABLE_FILE
from data_contracts.config import TrainConfig
from data_contracts.cost import Cost
from data_contracts.errors import ConfigError, InputError
from data_contracts.method import resolve
from data_contracts.records import Plan, Summary, Table
from stages.gradients.stored import decoded
from stages.mix.mixture import Given, Mixed, Mixture
from stages.mix.visits import visited
from stages.stage import Inputs, Work

if TYPE_CHECKING:
    from stages.mix.lab import Lab

BATCH_TOKENS = 4096
"""Padded tokens of a probe's pass where there is no plan."""


def mix_parts(settings: Mapping[str, Any], unit: str, train: TrainConfig, inputs: Inputs, work: Work) -> Summary:
    """Write `mixture`, sorted by part. Raises `InputError` for an empty pool, `ConfigError` for what is missing."""
    began = time.perf_counter()
    method = resolve(Mixture, settings, "select.mixture")
    labs: list[Lab] = []

    def lab() -> Lab:
        if not labs:
            labs.append(_lab(given, train, inputs, work))
        return labs[0]

    given = _given(method, unit, inputs, work, lab)
    mixed = method.mix(given)
    for used in labs:
        used.close()
    work.table("mixture", _columns(given, mixed))
    if not labs:
        work.charge("select", Cost(seconds=time.perf_counter() - began))
    return _summary(method, given, mixed)


def _given(method: Mixture, unit: str, inputs: Inputs, work: Work, lab: Callable[[], Lab]) -> Given:
    tokens = inputs.one("pool_tokens").table()
    if not tokens.num_rows:
        raise InputError("the pool holds at least one row", "it has none", "look at the quarantine of ingest")
    _require(method, inputs)
    coded = tokens.column("source").combine_chunks().dictionary_encode()
    names = np.array(coded.dictionary.to_pylist())
    order = np.argsort(names, kind="stable")
    part_N = np.argsort(order)[coded.indices.to_numpy()].astype(np.int32)
    parts = tuple(names[order].tolist())
    count = len(parts)
    first_N = pc.list_element(tokens.column("answer_mask"), 0).to_numpy().astype(np.int64)
    answers_N = tokens.column("n_answer_tokens").to_numpy() - first_N  # a row's first token is never predicted
    rows_P, tokens_P, answers_P = (
        np.bincount(part_N, weights, minlength=count).astype(np.int64)
        for weights in (None, tokens.column("n_tokens").to_numpy(), answers_N)
    )
    units_P = rows_P if unit == "rows" else tokens_P
    before = inputs.maybe("previous")
    share_P, state_P = units_P / units_P.sum(), np.full(count, np.nan)
    if before is not None:
        earlier = {row["part"]: row for row in before.table().to_pylist()}
        share_P = np.array([earlier[part]["share"] if part in earlier else 0.0 for part in parts])
        found = (earlier.get(part, {}).get("state") for part in parts)
        state_P = np.array([np.nan if value is None else value for value in found])
    ids = tokens.column("example_id")
    losses = inputs.all("example_losses") if "example_losses" in method.reads else ()
    return Given(
        parts,
        part_N,
        rows_P,
        tokens_P,
        answers_P,
        "rows" if unit == "rows" else "tokens",
        share_P,
        state_P,
        tuple(visited(item.table(), ids, part_N) for item in losses),
        _means(inputs.one("features").table(), ids, part_N, count) if "features" in method.reads else None,
        _mean_scores(inputs.one("scores").table(), ids, part_N, count) if "scores" in method.reads else None,
        work.rng("mix", method.name()),
        work.notice,
        lab,
    )


def _require(method: Mixture, inputs: Inputs) -> None:
    """Raise `ConfigError` where an artifact that the mixture reads was not given."""
    remedies = {
        "features": "set `store_bits: 8` in `score.scorer` of a method that makes them, such as `less`",
        "scores": "score the pool first",
        "example_losses": "give those of the last segment",
    }
    for name in sorted(method.reads & set(remedies)):
        if not inputs.all(name):
            promised = f"mixture {method.name()} is given {name.replace('_', ' ')}"
            raise ConfigError(promised, "there are none", remedies[name])


def _places(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> np.ndarray:
    """Return the pool row of each of `others`, -1 where it is not in the pool."""
    found = pc.fill_null(pc.index_in(others, value_set=ids.combine_chunks()), -1)
    return np.asarray(found.to_numpy(), dtype=np.int64)


def _means(features: pa.Table, ids: pa.ChunkedArray, part_N: np.ndarray, parts: int) -> np.ndarray:
    """Return mean_PK float64 of each part's features, NaN for a part without any; some rows at a time."""
    row_F, start = _places(ids, features.column("example_id")), 0
    width = features.column("dimensions")[0].as_py()
    sum_PK, count_P = np.zeros((parts, width)), np.zeros(parts)
    for found, feature_BK in decoded(features):
        row_B = row_F[start : start + len(found)]
        start += len(found)
        part_B = part_N[row_B[row_B >= 0]]
        np.add.at(sum_PK, part_B, feature_BK[row_B >= 0].astype(np.float64))
        count_P += np.bincount(part_B, minlength=parts)
    return np.asarray(np.divide(sum_PK, count_P[:, None], out=np.full_like(sum_PK, np.nan), where=count_P[:, None] > 0))


def _mean_scores(scores: pa.Table, ids: pa.ChunkedArray, part_N: np.ndarray, parts: int) -> np.ndarray:
    """Return score_P, the mean of each part's finite scores, NaN where there is none."""
    score_S = scores.column("score").to_numpy().astype(np.float64)
    row_S = _places(ids, scores.column("example_id"))
    kept = (row_S >= 0) & np.isfinite(score_S)
    part_S = part_N[row_S[kept]]
    count_P, sum_P = np.bincount(part_S, minlength=parts), np.bincount(part_S, score_S[kept], minlength=parts)
    return np.asarray(np.divide(sum_P, count_P, out=np.full(parts, np.nan), where=count_P > 0))


def _lab(given: Given, train: TrainConfig, inputs: Inputs, work: Work) -> Lab:
    from stages.meter.machine import device_kind
    from stages.mix.lab import Bench, Lab
    from stages.model.pin import read_pin

    base, target = inputs.maybe("base"), inputs.maybe("target_tokens")
    if base is None or target is None or not target.ref.rows:
        missing = "no base model" if base is None else "no target row"
        raise ConfigError("a mixture that is tried out has a base model and a target", missing, "run the pipeline")
    checkpoint, planned = inputs.maybe("checkpoint"), inputs.maybe("plan")
    plan = planned.record(Plan) if planned else None
    bench = Bench(
        read_pin(base),
        checkpoint.folder if checkpoint else None,
        inputs.one("pool_tokens").folder / TABLE_FILE,
        target.folder / TABLE_FILE,
        device_kind(),
        plan.precision if plan else "float32",
        plan.micro_batch * plan.row_tokens if plan else BATCH_TOKENS,
        train,
    )
    return Lab(bench, given.part_N, len(given.parts), work)


def _columns(given: Given, mixed: Mixed) -> dict[str, Any]:
    count = len(given.parts)
    state_P = np.full(count, np.nan) if mixed.state_P is None else mixed.state_P
    phase_P = np.zeros(count, np.int32) if mixed.phase_P is None else mixed.phase_P
    return {
        "part": list(given.parts),
        "rows": given.rows_P,
        "tokens": given.tokens_P,
        "prior": given.prior,
        "share": mixed.share_P,
        "phase": phase_P,
        "replay": np.where(phase_P > phase_P.min(), mixed.replay, 0.0),
        "state": [None if np.isnan(value) else value for value in state_P.tolist()],
    }


def _summary(method: Mixture, given: Given, mixed: Mixed) -> Summary:
    columns = _columns(given, mixed)
    largest = np.argsort(-mixed.share_P, kind="stable")[:20]
    lines = [
        (given.parts[at], int(given.rows_P[at]), *(round(float(columns[n][at]), 4) for n in ("prior", "share")),
         int(columns["phase"][at]))
        for at in largest
    ]  # fmt: skip
    facts = {"mixture": method.name(), "standing": method.standing(), "parts": len(given.parts), "unit": given.unit}
    table = Table(title="Mixture", columns=("part", "rows", "of the pool", "share", "phase"), rows=tuple(lines))
    return Summary(title=f"mix: {method.name()}", facts={**facts, **mixed.facts}, tables=(table, *mixed.tables))
