"""The noise filter at work in the stage: gathers what is known of the pool's rows, sifts, lists every row that falls.

Held: a few numbers a row. What a filter does not read stays on disk.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.method import resolve
from data_contracts.records import Table
from stages.select.join import column_for, scores_for
from stages.select.noise import Evidence, NoiseFilter, Sifted
from stages.select.selector import Candidates
from stages.stage import Inputs, Work
from stages.statistics.trajectories import Trajectories

SOURCES_SHOWN = 20


def sift_pool(settings: dict[str, Any], tokens: pa.Table, pool: Candidates, inputs: Inputs, work: Work) -> Sifted:
    """Sift the pool by the configured filter and put what it drops into the quarantine, reason `noise`.

    Raises like `resolve` and `NoiseFilter.sift`, and `InputError` for further scores of another pool.
    """
    method = resolve(NoiseFilter, settings, "select.noise")
    scores, losses = inputs.maybe("scores"), inputs.all("example_losses")
    evidence = Evidence(
        tokens,
        pool.score_N,
        None if scores is None else column_for(pool.ids, scores.table(), "loss"),
        tuple(scores_for(pool.ids, other.table())[0] for other in inputs.all("other_scores")),
        Trajectories([artifact.folder for artifact in losses]) if losses else None,
        pool.features,
    )
    sifted = method.sift(evidence)
    for row in sifted.dropped_D.tolist():
        work.quarantine(
            split="pool",
            reason="noise",
            detail=f"the noise filter {method.name()} gives it {sifted.suspicion_N[row]:.4g}, above what it lets pass; "
            "`select.noise` names the filter",
            example_id=pool.ids[row].as_py(),
        )
    if not len(sifted.dropped_D):
        work.notice(f"the noise filter {method.name()} dropped no row: {_why_none(sifted)}")
    return sifted


def noise_facts(sifted: Sifted) -> dict[str, Any]:
    """Return what the summary says of the filter."""
    return {
        "noise_filter": sifted.method.name(),
        "noise_filter_standing": sifted.method.standing(),
        "noise_known": sifted.known,
        "noise_dropped": len(sifted.dropped_D),
    }


def noise_table(sifted: Sifted, sources: pa.ChunkedArray) -> Table:
    """Return how many rows of each source fell, the most first, beside how many there were."""
    whole = {str(item["values"]): int(item["counts"]) for item in pc.value_counts(sources).to_pylist()}
    fell = pc.value_counts(sources.take(pa.array(sifted.dropped_D))).to_pylist()
    counted = sorted(((str(item["values"]), int(item["counts"])) for item in fell), key=lambda item: (-item[1], item))
    rows = [(source, count, whole[source]) for source, count in counted[:SOURCES_SHOWN]]
    if rest := counted[SOURCES_SHOWN:]:
        rows.append((f"{len(rest)} more", sum(count for _, count in rest), sum(whole[source] for source, _ in rest)))
    return Table(title="Dropped as noise", columns=("source", "dropped", "in the pool"), rows=tuple(rows))


def _why_none(sifted: Sifted) -> str:
    if not sifted.known:
        return "it knows nothing of any row"
    if sifted.method.drop is not None or sifted.method.limit is not None:
        return f"none of the {sifted.known} rows that it knows is above what it lets pass"
    return f"the {sifted.known} rows that it knows are no two groups of which the smaller stands above"
