"""What a scoring says about itself: how scores lie, whether length explains them, and what stands at either end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.records import Summary, Table
from stages.score.scorer import Scorer
from stages.score.texts import beginning, text_of
from stages.stage import Artifact
from stages.statistics.rank import spearman

SHOWN = 5
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def report(
    method: Scorer,
    *,
    groups: tuple[str, ...],
    pool: pa.Table,
    score_N: np.ndarray,
    quarantined: dict[str, int],
    examples: Artifact | None,
    found: dict[str, Any],
    measured: dict[str, Any],
) -> Summary:
    """Return the stage's summary; `score_N` is NaN where a row has no score, `found` what the method says of itself."""
    valid = np.flatnonzero(np.isfinite(score_N))
    lengths = pool.column("n_tokens").to_numpy()[valid]
    correlation = spearman(score_N[valid], lengths)
    facts: dict[str, Any] = {
        "scorer": method.name(),
        "rows": pool.num_rows,
        "scored": len(valid),
        "quarantined": sum(quarantined.values()),
        "target_groups": ", ".join(groups) or None,
        "spearman_score_length": None if correlation is None else round(correlation, 4),
        **found,
    }
    spread = np.quantile(score_N[valid].astype(np.float64), QUANTILES) if len(valid) else np.zeros(0)
    quantiles = tuple((f"{share:.0%}", float(f"{value:.6g}")) for share, value in zip(QUANTILES, spread, strict=False))
    tables = [Table(title="Scores", columns=("quantile", "score"), rows=quantiles)]
    tables.append(_ends(pool, score_N, valid, examples))
    if quarantined:
        rows = tuple(sorted(quarantined.items()))
        tables.append(Table(title="Not scored", columns=("reason", "rows"), rows=rows))
    return Summary(title="Scores of the pool", facts=facts, measured=measured, tables=tuple(tables))


def _ends(pool: pa.Table, score_N: np.ndarray, valid: np.ndarray, examples: Artifact | None) -> Table:
    """Return the best and the worst rows, ties in the pool's order."""
    order = valid[np.argsort(-score_N[valid].astype(np.float64), kind="stable")]
    count = min(SHOWN, len(order))
    shown = [("best", row) for row in order[:count]] + [
        ("worst", row) for row in order[max(count, len(order) - SHOWN) :]
    ]
    table = examples.table() if examples else None
    rows = []
    for end, row in shown:
        example_id = pool.column("example_id")[int(row)].as_py()
        text = beginning(text_of(table, example_id)) if table is not None else ""
        rows.append((end, float(f"{score_N[row]:.6g}"), example_id, text))
    return Table(title="Best and worst", columns=("end", "score", "example_id", "text"), rows=tuple(rows))
