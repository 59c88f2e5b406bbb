"""The engine of selecting: joins scores to the pool, chooses, writes the selection and says what is in it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.config import SelectConfig
from data_contracts.cost import Cost
from data_contracts.errors import ConfigError
from data_contracts.records import Likeness, Summary, Table
from stages.meter.products import tallied
from stages.select.choose import Chosen, choose
from stages.select.features import features_for
from stages.select.figures import show
from stages.select.join import columns_for, exact_for, scores_for
from stages.select.parts import Part, parts_of
from stages.select.repetition import shown
from stages.select.selector import Candidates
from stages.select.sift import noise_facts, noise_table, sift_pool
from stages.select.view import Viewed, group_names
from stages.stage import Inputs, Work
from stages.text.examples import text_of, texts_of
from stages.text.likeness import MOST_ROWS, likeness


def select_rows(config: SelectConfig, inputs: Inputs, work: Work, *, passes: float = 1.0) -> Summary:
    """Choose from the pool's tokens and write `selection`, best first; training makes `passes` over it."""
    began = time.perf_counter()
    with tallied() as tally:
        summary = _selected(config, inputs, work, passes)
    work.charge("select", Cost(flops=tally.flops, seconds=time.perf_counter() - began))
    return summary


def _selected(config: SelectConfig, inputs: Inputs, work: Work, passes: float) -> Summary:
    tokens = inputs.one("pool_tokens").table()
    given = inputs.maybe("scores")
    scores = None if given is None else given.table()
    score_N, missing = (None, 0) if scores is None else scores_for(tokens.column("example_id"), scores)
    if missing:
        work.notice(f"{missing} of {tokens.num_rows} pool rows stand in no score table and count as not scorable")
    lengths_N = tokens.column("n_tokens").to_numpy()
    ids, features = tokens.column("example_id"), inputs.maybe("features")
    target = inputs.maybe("target_tokens")
    pool = Candidates(
        ids,
        tokens.column("source"),
        lengths_N,
        score_N,
        None if scores is None else partial(columns_for, ids, scores),
        None if scores is None else partial(exact_for, ids, scores),
        () if target is None else tuple(sorted(pc.unique(target.table().column("source")).to_pylist())),
        features=None if features is None else features_for(ids, features.table()),
    )
    target_ids = inputs.one("target_tokens").table().column("example_id").to_pylist() if config.include_target else ()
    name = str(config.selector.get("method"))
    parts = mixture_for(config, inputs)
    rng = work.rng("select", name)
    sifted = None if config.noise is None else sift_pool(config.noise, tokens, pool, inputs, work)
    kept_K = None if sifted is None else sifted.kept_K
    chosen = choose(config, pool, rng, work.notice, target_ids=target_ids, parts=parts, passes=passes, kept_K=kept_K)
    work.table("selection", chosen.table)
    if chosen.curves:
        work.table("repetition", pa.concat_tables(curve.table(part) for part, curve in sorted(chosen.curves.items())))
    refused = _refuse(pool, work)
    summary = _summary(pool, chosen, refused)
    facts, tables = summary.facts, summary.tables
    if sifted is not None:
        facts, tables = {**facts, **noise_facts(sifted)}, (*tables, noise_table(sifted, pool.sources))
    summary = summary.model_copy(update={"facts": facts, "tables": tables})
    gain_S = chosen.table.column("gain").to_numpy()[: len(chosen.rows)]
    told = likeness_of(pool, chosen.rows, inputs, work)
    if told is not None:
        work.record("likeness", told)
        share = f"{told.chosen:.0%} of the chosen, {told.pool:.0%} of the pool"
        summary = summary.model_copy(update={"facts": {**summary.facts, "of the target's kind": share}})
    dropped_D = np.zeros(0, dtype=np.int64) if sifted is None else sifted.dropped_D
    viewed = Viewed(pool, chosen.rows, gain_S, dropped_D, group_names(pool))
    tables = (*tables, *show(viewed, summary, inputs, work))
    return summary.model_copy(update={"tables": tables})


def likeness_of(pool: Candidates, row_S: np.ndarray, inputs: Inputs, work: Work) -> Likeness | None:
    """Return how many of the chosen rows are of the validation rows' kind; None where that is not asked or told."""
    validation, examples = inputs.maybe("validation"), inputs.maybe("pool")
    if validation is None or examples is None:
        return None
    rng, texts = work.rng("select", "likeness"), examples.table()

    def drawn(rows: np.ndarray) -> list[str]:
        some = np.sort(rng.permutation(rows)[:MOST_ROWS]).tolist()
        return [text_of(texts, str(pool.ids[row].as_py())) for row in some]

    table = validation.table()
    some = np.sort(rng.permutation(table.num_rows)[:MOST_ROWS])
    return likeness(list(texts_of(table.take(some))), drawn(row_S), drawn(np.arange(len(pool))), rng)


def mixture_for(config: SelectConfig, inputs: Inputs) -> tuple[Part, ...]:
    """Return the parts of the mixture; none where none is configured. Raises `ConfigError` where it was not made."""
    if config.mixture is None:
        return ()
    given = inputs.maybe("mixture")
    if given is None:
        raise ConfigError(
            "`select.mixture` comes with what the stage mix made of it",
            "no mixture was given",
            "run the pipeline, or pass the output `mixture` of the stage mix",
        )
    return parts_of(given.table())


def _refuse(pool: Candidates, work: Work) -> int:
    """Quarantine every row that could not be ranked for want of a score."""
    if pool.score_N is None:
        return 0
    rows = np.flatnonzero(~np.isfinite(pool.score_N)).tolist()
    for row in rows:
        work.quarantine(
            split="pool",
            reason="not_scorable",
            detail="it has no valid score, so it cannot be chosen by score; the score stage's quarantine says why",
            example_id=pool.ids[row].as_py(),
            field="score",
        )
    return len(rows)


def _summary(pool: Candidates, chosen: Chosen, refused: int) -> Summary:
    rows, table = chosen.rows, chosen.table
    assert pool.lengths_N is not None
    taken = pool.lengths_N[rows]
    facts: dict[str, Any] = {
        "selector": chosen.method.name(),
        "standing": chosen.method.standing(),
        "budget": chosen.quota.asked,
        "pool_rows": len(pool),
        "chosen": len(rows),
        "chosen_tokens": int(taken.sum(dtype=np.int64)),
        "target_rows": table.num_rows - len(rows) - chosen.replayed,
        "not_scorable": refused,
        "mean_tokens_chosen": round(float(taken.mean()), 1) if len(rows) else None,
        "mean_tokens_pool": round(float(pool.lengths_N.mean()), 1),
    }
    if chosen.replayed:
        facts["replayed_rows"] = chosen.replayed
    repeats = table.column("repeats").to_numpy()[: len(rows)]
    if chosen.curves or repeats.max(initial=1) > 1:
        facts["repeated_rows"] = int((repeats > 1).sum())
        facts["visited_tokens"] = int(taken.astype(np.int64) @ repeats)
    if pool.score_N is not None and np.isfinite(pool.score_N[rows]).any():
        facts["lowest_score_chosen"] = float(f"{np.nanmin(pool.score_N[rows]):.6g}")
    counts = table.group_by("mixture").aggregate([([], "count_all")])
    order = pc.sort_indices(counts, [("count_all", "descending"), ("mixture", "ascending")])
    parts = tuple((row["mixture"], row["count_all"]) for row in counts.take(order).to_pylist())
    pool_counts = {str(row["values"]): int(row["counts"]) for row in pc.value_counts(pool.sources).to_pylist()}
    mixture = tuple((part, count, pool_counts.get(part)) for part, count in parts[:20])
    first = tuple(
        (row["rank"], row["example_id"], row["mixture"], row["reason"]) for row in table.slice(0, 5).to_pylist()
    )
    return Summary(
        title="Selection",
        facts=facts,
        tables=(
            Table(title="Mixture", columns=("part", "chosen", "in the pool"), rows=mixture),
            *([shown(chosen.curves)] if chosen.curves else []),
            Table(title="First rows", columns=("rank", "example_id", "part", "why"), rows=first),
        ),
    )
