"""What a scoring says about itself: how scores lie, whether length explains them, and what stands at either end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.records import Summary, Table
from stages.score.checkups import Scored, agreement_table, agreements, suspects
from stages.score.scorer import Scorer
from stages.stage import Artifact
from stages.text.examples import beginning, text_of

SHOWN = 5
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def report(
    method: Scorer,
    *,
    groups: tuple[str, ...],
    pool: pa.Table,
    scored: Scored,
    earlier: Iterable[tuple[str, np.ndarray]],
    quarantined: dict[str, int],
    examples: Artifact | None,
    found: dict[str, Any],
    measured: dict[str, Any],
) -> Summary:
    """Return the stage's summary; `earlier` are names and scores of the same rows, `found` what the method says of
    itself."""
    score_N = scored.score_N
    valid = np.flatnonzero(np.isfinite(score_N))
    agreed = agreements(scored, earlier)
    by_name = {item.name: item.spearman for item in agreed}
    facts: dict[str, Any] = {
        "scorer": method.name(),
        "standing": method.standing(),
        "rows": pool.num_rows,
        "scored": len(valid),
        "quarantined": sum(quarantined.values()),
        "target_groups": ", ".join(groups) or None,
        "spearman_score_length": by_name.get("tokens"),
        "spearman_score_loss": by_name.get("loss"),
        **found,
    }
    spread = np.quantile(score_N[valid].astype(np.float64), QUANTILES) if len(valid) else np.zeros(0)
    quantiles = tuple((f"{share:.0%}", float(f"{value:.6g}")) for share, value in zip(QUANTILES, spread, strict=False))
    tables = [Table(title="Scores", columns=("quantile", "score"), rows=quantiles)]
    tables.append(agreement_table(agreed))
    table = examples.table() if examples else None
    ids = pool.column("example_id")

    def text(example_id: str) -> str:
        return beginning(text_of(table, example_id)) if table is not None else ""

    tables.append(_ends(ids, score_N, valid, text))
    suspicious = suspects(method, scored, lambda row: str(ids[row].as_py()), text)
    if suspicious is not None:
        tables.append(suspicious)
    if quarantined:
        rows = tuple(sorted(quarantined.items()))
        tables.append(Table(title="Not scored", columns=("reason", "rows"), rows=rows))
    return Summary(title="Scores of the pool", facts=facts, measured=measured, tables=tuple(tables))


def _ends(ids: pa.ChunkedArray, score_N: np.ndarray, valid: np.ndarray, text: Callable[[str], str]) -> Table:
    """Return the best and the worst rows, ties in the pool's order."""
    order = valid[np.argsort(-score_N[valid].astype(np.float64), kind="stable")]
    count = min(SHOWN, len(order))
    shown = [("best", row) for row in order[:count]] + [
        ("worst", row) for row in order[max(count, len(order) - SHOWN) :]
    ]
    rows = []
    for end, row in shown:
        example_id = ids[int(row)].as_py()
        rows.append((end, float(f"{score_N[row]:.6g}"), example_id, text(example_id)))
    return Table(title="Best and worst", columns=("end", "score", "example_id", "text"), rows=tuple(rows))
