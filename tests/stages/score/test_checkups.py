"""What a scoring says beside its scores: agreement, suspicious rows, and the picture, against scipy and by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.stats import spearmanr

from data_contracts.records import Summary, Table
from data_contracts.tables import EXAMPLES
from stages.model.batch import Row
from stages.page.points import MOST_POINTS, drawn
from stages.score.checkups import Scored, agreements
from stages.score.figures import FILE, draw
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import rows_of
from tests.stages.score.setting import Setting, make_setting


def table_of(summary: Summary, title: str) -> list[dict[str, Any]]:
    (table,) = [item for item in summary.tables if item.title.startswith(title)]
    assert isinstance(table, Table)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def with_examples(setting: Setting, folder: Path, rows: list[Row]) -> None:
    """Give the pool texts, so that tables can show them."""
    work = LocalWork(folder, {"pool": "examples"})
    columns = {
        "example_id": [row.example_id for row in rows],
        "source": ["all"] * len(rows),
        "file": ["f"] * len(rows),
        "row": list(range(1, len(rows) + 1)),
        "messages": [""] * len(rows),
        "tools": [""] * len(rows),
        "text": [f"text of {row.example_id}" for row in rows],
        "extra": ["{}"] * len(rows),
    }
    work.table("pool", pa.table(columns, schema=EXAMPLES.schema))
    setting.inputs["pool"] = work.artifact("pool")


def test_correlations_are_scipys_and_leave_out_what_is_not_known() -> None:
    random = np.random.default_rng(0)
    score, loss = random.normal(size=50).astype(np.float32), random.normal(size=50)
    score[:5], loss[40:] = np.nan, np.nan
    tokens = random.integers(1, 9, 50)
    found = {
        item.name: item
        for item in agreements(
            Scored(score, loss, tokens, np.ones(50)), [("earlier", np.full(50, np.nan)), ("same", score)]
        )
    }
    assert found["tokens"].spearman == round(spearmanr(score[5:], tokens[5:]).statistic, 4)
    assert found["loss"].spearman == round(spearmanr(score[5:40], loss[5:40]).statistic, 4)
    assert (found["tokens"].rows, found["loss"].rows, found["same"].rows) == (45, 35, 45)
    assert found["answer tokens"].spearman is None  # constant
    assert found["same"].spearman == 1.0
    assert "earlier" not in found


def test_the_stage_tells_agreement_with_loss_length_and_earlier_scores(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    first, _ = setting.score("first", scorer={"method": "perplexity"})
    setting.inputs["previous_scores"] = first.artifact("scores")
    work, summary = setting.score("second", scorer={"method": "influence"})
    rows, before = work.rows("scores"), first.rows("scores")
    found = {row["with"]: row["Spearman"] for row in table_of(summary, "Rank correlation")}
    scores = [row["score"] for row in rows]
    for name, other in (
        ("tokens", [row["n_tokens"] for row in rows]),
        ("loss", [row["loss"] for row in rows]),
        ("earlier scores, 1 back", [row["score"] for row in before]),
    ):
        assert found[name] == round(spearmanr(scores, other).statistic, 4)
    assert summary.facts["spearman_score_loss"] == found["loss"]


def test_the_noise_audit_lists_the_largest_norms_or_losses_with_their_texts(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    with_examples(setting, tmp_path / "texts", rows_of(24, seed=1))
    for method, key, sign in (
        ({"method": "grand"}, "score", 1),
        ({"method": "grand", "order": "easy"}, "score", -1),
        ({"method": "perplexity", "order": "low"}, "loss", 1),
    ):
        work, summary = setting.score(f"{method}", scorer=method)
        worst = sorted(work.rows("scores"), key=lambda row: -sign * row[key])[:10]
        listed = table_of(summary, "Noise audit")
        assert [row["example_id"] for row in listed] == [row["example_id"] for row in worst]
        assert all(row["text"] == f"text of {row['example_id']}" for row in listed)
    _, summary = setting.score("none", scorer={"method": "length"})
    assert not [table for table in summary.tables if table.title.startswith("Noise audit")]  # nothing tells


def test_the_picture_is_a_measured_file_of_bounded_size_and_the_scores_bytes_do_not_depend_on_it(
    tmp_path: Path,
) -> None:
    setting = make_setting(tmp_path)
    work, _ = setting.score("one", scorer={"method": "perplexity"})
    digest = work.artifact("scores").ref.digest
    picture = work.measured("scores", FILE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert work.artifact("scores").ref.digest == digest
    random, count = np.random.default_rng(0), 200_000
    big = Scored(
        random.normal(size=count).astype(np.float32),
        random.normal(size=count),
        random.integers(1, 999, count),
        np.ones(count),
    )
    draw(tmp_path / "big.png", big, "influence")
    assert (tmp_path / "big.png").stat().st_size < 300_000
    assert len(drawn(big.score_N, big.loss_N)) == MOST_POINTS
    assert np.array_equal(drawn(big.score_N, big.loss_N), drawn(big.score_N, big.loss_N))
