"""A mixture filled: shares of any selector, shortage, repeats, interleaved ranks, phases and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.config import SelectConfig
from data_contracts.errors import ConfigError, InputError
from stages.select.parts import apportion
from stages.select.stage import STAGE, SelectSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.select.test_select import scores_table, tokens_table

SOURCES = ["x"] * 6 + ["y"] * 6 + ["z"] * 6
IDS = [f"{number:02d}" for number in range(18)]
SCORES = {example_id: float(-number) for number, example_id in enumerate(IDS)}
ANY = {"method": "fixed"}


def mixture(folder: Path, shares: dict[str, float], **columns: list[Any]) -> Artifact:
    work, count = LocalWork(folder, {"m": "mixture"}), len(shares)
    settings: dict[str, list[Any]] = {"phase": [0] * count, "replay": [0.0] * count, "state": [None] * count}
    work.table(
        "m",
        {
            "part": list(shares),
            "rows": [6] * count,
            "tokens": [60] * count,
            "prior": [1 / 3] * count,
            "share": list(shares.values()),
            **(settings | columns),
        },
    )
    return work.artifact("m")


def run(folder: Path, made: Artifact | None, lengths: list[int] | None = None, **config: Any) -> LocalWork:
    given_inputs = {
        "pool_tokens": tokens_table(folder / "pool", IDS, lengths or [10] * 18, SOURCES),
        "scores": scores_table(folder / "scores", SCORES),
        **({} if made is None else {"mixture": made}),
    }
    work = work_for(STAGE, folder / "work")
    select = SelectConfig(**({"mixture": ANY} | config))
    STAGE.run(SelectSlice(seed=0, select=select), inputs_of(**given_inputs), work)
    return work


def parts(work: LocalWork) -> list[str]:
    return [row["mixture"] for row in work.rows("selection")]


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=6),
)
def test_units_are_apportioned_whole_within_what_there_is_and_near_the_shares(total, rows):
    share, most = (np.array(column) for column in zip(*rows, strict=True))
    found = apportion(total, share.astype(float), most.astype(np.int64))
    open_ = share > 0
    assert found.sum() == min(total, int(most[open_].sum()))
    assert (found >= 0).all()
    assert (found <= most).all()
    assert (found[~open_] == 0).all()
    if open_.any() and (total * share / share[open_].sum() <= most)[open_].all():
        assert np.abs(found - total * share / share[open_].sum())[open_].max() < 1


@pytest.mark.parametrize("method", ["top_k", "random"])
def test_each_part_gets_its_share_of_any_selector_and_prefixes_keep_it(tmp_path, method):
    made = mixture(tmp_path / "m", {"x": 0.5, "y": 0.25, "z": 0.25})
    work = run(tmp_path, made, count=8, selector={"method": method})
    found = parts(work)
    assert sorted(found) == ["x"] * 4 + ["y"] * 2 + ["z"] * 2
    assert sorted(found[:4]) == ["x", "x", "y", "z"]
    if method == "top_k":
        assert [row["example_id"] for row in work.rows("selection") if row["mixture"] == "y"] == ["06", "07"]


def test_shares_under_a_token_quota_are_of_tokens(tmp_path):
    made = mixture(tmp_path / "m", {"x": 0.5, "y": 0.5})
    work = run(tmp_path, made, lengths=[5] * 6 + [10] * 12, tokens=60)
    assert sorted(parts(work)) == ["x"] * 6 + ["y"] * 3


def test_what_a_part_lacks_goes_to_the_others_and_is_said(tmp_path):
    made = mixture(tmp_path / "m", {"x": 0.8, "y": 0.1, "z": 0.1})
    work = run(tmp_path, made, count=12)
    assert sorted(parts(work)) == ["x"] * 6 + ["y"] * 3 + ["z"] * 3
    assert work.notices == ["x has too few rows for its share: 50.0% in place of 80.0%; the rest got it"]


def test_with_repetition_a_part_that_lacks_rows_repeats_them(tmp_path):
    made = mixture(tmp_path / "m", {"x": 0.8, "y": 0.2})
    law = {"method": "muennighoff"}
    work = run(tmp_path, made, count=15, repetition=law, selector={"method": "random"})
    visits = {"x": 0, "y": 0}
    for row in work.rows("selection"):
        visits[row["mixture"]] += row["repeats"]
    assert visits == {"x": 12, "y": 3}
    assert {row["part"] for row in work.rows("repetition")} == {"x", "y"}


def test_later_phases_replay_earlier_rows_within_the_quota(tmp_path):
    made = mixture(
        tmp_path / "m", {"x": 1 / 3, "y": 1 / 3, "z": 1 / 3}, phase=[0, 1, 2], replay=[0.0, 0.5, 0.5]
    )  # fmt: skip
    work = run(tmp_path, made, count=16)
    rows = work.rows("selection")
    assert len(rows) == 16
    own = [row for row in rows if not row["reason"].startswith("replayed")]
    again = [row for row in rows if row["reason"].startswith("replayed")]
    assert {(row["mixture"], row["order"]) for row in own} == {("x", 0), ("y", 1), ("z", 2)}
    assert len(own) == 12
    assert [row["order"] for row in again] == [1, 1, 2, 2]
    assert all(row["mixture"] in ("x", "y")[: row["order"]] for row in again)
    first = {row["example_id"]: row["order"] for row in own}
    assert all(first[row["example_id"]] < row["order"] for row in again)
    assert [row["rank"] for row in rows] == list(range(16))


def test_a_mixture_that_was_not_made_or_names_no_part_of_the_pool_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no mixture was given"):
        run(tmp_path / "a", None, count=3)
    with pytest.raises(InputError, match="none of w has"):
        run(tmp_path / "b", mixture(tmp_path / "m", {"w": 1.0}), count=3)
