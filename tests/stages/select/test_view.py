"""What a user sees of a selection: every number against brute force, and a page that no text of the data can break."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from plotly.offline import get_plotlyjs

from data_contracts.config import SelectConfig
from data_contracts.records import Summary
from stages.select.figures import MOST_GAINS, PAGE, PICTURE, gains
from stages.select.map import MOST, planes_of, points_of
from stages.select.selector import Candidates
from stages.select.stage import STAGE, SelectSlice
from stages.select.view import Viewed, by_group, by_length, by_source, closest_pairs, coverage, nearest_rejected
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.select.test_coreset_selectors import features_table, scored_table
from tests.stages.select.test_select import tokens_table

BAD = "<script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 $x_{"


def examples_table(folder: Path, ids: list[str], texts: list[str], sources: list[str]) -> Artifact:
    work = LocalWork(folder, {"t": "examples"})
    with work.writer("t") as writer:
        for row, (name, text, source) in enumerate(zip(ids, texts, sources, strict=True), start=1):
            values = {"example_id": name, "source": source, "file": "f", "row": row, "text": text, "extra": "{}"}
            writer.append({**values, "messages": "", "tools": ""})
    return work.artifact("t")


def viewed_of(rng: np.random.Generator, rows: int, taken: int, *, groups: int = 2, dropped: int = 0) -> Viewed:
    """A pool of `rows` rows with some scores missing, and a random choice from it."""
    column = rng.normal(size=(rows, groups)).astype(np.float32) * np.arange(1, groups + 1)
    column[rng.random(rows) < 0.1] = np.nan
    order = rng.permutation(rows)
    pool = Candidates(
        pa.chunked_array([pa.array([f"{row:04d}" for row in range(rows)])]),
        pa.chunked_array([pa.array([f"s{row % 30 if row % 3 else 0}" for row in range(rows)])]),
        rng.integers(1, 200, rows).astype(np.int32),
        column.mean(axis=1),
        (lambda: column) if groups > 1 else None,
    )
    names = tuple(f"g{group}" for group in range(groups)) if groups > 1 else ("target",)
    return Viewed(pool, order[:taken], rng.normal(size=taken), np.sort(order[taken : taken + dropped]), names)


@pytest.mark.parametrize(("rows", "taken"), [(500, 60), (1, 1), (40, 40)])
def test_compositions_count_every_row_of_pool_and_choice_once(rows: int, taken: int) -> None:
    viewed = viewed_of(np.random.default_rng(0), rows, taken)
    sources, lengths = viewed.pool.sources.to_pylist(), viewed.pool.lengths_N
    assert lengths is not None
    chosen = set(viewed.row_S.tolist())
    listed = by_source(viewed).rows
    for source, pool, some in listed[:20]:
        assert pool == sources.count(source)
        assert some == sum(sources[row] == source for row in chosen)
    table = by_length(viewed)
    assert table is not None
    for name, pool, some in table.rows:
        low, high = (int(number) for number in str(name).removesuffix(" tokens").split("–"))
        inside = [row for row in range(rows) if low <= lengths[row] <= high]
        assert (pool, some) == (len(inside), len(chosen & set(inside)))
    for rows_of in (listed, table.rows):
        assert (sum(row[1] for row in rows_of), sum(row[2] for row in rows_of)) == (rows, taken)


def test_groups_are_counted_by_what_a_row_serves_best_and_covered_by_mass_and_by_best_rows() -> None:
    viewed = viewed_of(np.random.default_rng(1), 300, 50, groups=3)
    column = viewed.pool.column_NJ
    assert column is not None
    known = [row for row in range(300) if np.isfinite(column[row]).all()]
    z = (column[known] - column[known].mean(axis=0)) / column[known].std(axis=0)
    best = {row: int(np.argmax(z[at])) for at, row in enumerate(known)}
    table, covered = by_group(viewed), coverage(viewed)
    assert table is not None
    assert covered is not None
    for group, ((name, pool, some), (also, mass, share)) in enumerate(zip(table.rows, covered.rows, strict=True)):
        assert name == also == f"g{group}"
        assert pool == sum(value == group for value in best.values())
        assert some == sum(best.get(row) == group for row in viewed.row_S.tolist())
        positive = {row: max(float(column[row, group]), 0.0) for row in known}
        held = sum(positive.get(row, 0.0) for row in viewed.row_S.tolist()) / sum(positive.values())
        assert mass == pytest.approx(held, abs=1e-4)
        top = sorted(known, key=lambda row, group=group: -column[row, group])[:50]
        assert share == pytest.approx(len(set(top) & set(viewed.row_S.tolist())) / 50, abs=1e-4)


def test_the_nearest_rejected_are_the_best_scored_rows_neither_chosen_nor_dropped() -> None:
    viewed = viewed_of(np.random.default_rng(2), 200, 30, dropped=40)
    score = viewed.pool.score_N
    assert score is not None
    out = set(viewed.row_S.tolist()) | set(viewed.dropped_D.tolist())
    left = [row for row in range(200) if row not in out and np.isfinite(score[row])]
    assert nearest_rejected(viewed).tolist() == sorted(left, key=lambda row: -score[row])[:10]
    everything = viewed_of(np.random.default_rng(2), 20, 20)
    assert not len(nearest_rejected(everything))


@pytest.mark.parametrize("rows", [2, 30, 700])
def test_the_closest_pairs_are_those_of_all_pairs(rows: int) -> None:
    row = np.random.default_rng(0).normal(size=(rows, 6))
    row /= np.linalg.norm(row, axis=1)[:, None]
    cosine = row @ row.T
    pairs = sorted((-cosine[i, j], i, j) for i in range(rows) for j in range(i + 1, rows))[:10]
    found = closest_pairs(row)
    assert [(i, j) for i, j, _ in found] == [(i, j) for _, i, j in pairs]
    np.testing.assert_allclose([value for *_, value in found], [-minus for minus, *_ in pairs])


def test_points_and_gains_are_bounded_and_say_how_many_of_how_many(tmp_path: Path) -> None:
    viewed = viewed_of(np.random.default_rng(3), 9000, 3000, groups=1, dropped=900)
    points = points_of(viewed, None, None, np.random.default_rng(0))
    drawn = {kind: int((points.kind_M == kind).sum()) for kind in MOST}
    assert drawn == {
        "pool": MOST["pool"],
        "chosen": MOST["chosen"],
        "dropped as noise": MOST["dropped as noise"],
        "target": 0,
    }
    said = "pool 1500 of 5100, dropped as noise 500 of 900, chosen 1000 of 3000"
    assert points.sampled(np.arange(len(points.ids))) == said
    assert {*points.row_M[points.kind_M == "chosen"].tolist()} <= {*viewed.row_S.tolist()}
    (plane,) = planes_of(viewed, points)
    assert plane.axes == ("tokens", "score")
    rank, gain = gains(viewed)
    assert len(rank) == MOST_GAINS
    np.testing.assert_array_equal(gain, viewed.gain_S[rank])


class Page(HTMLParser):
    """The elements of a page, its visible text, and what its scripts hold."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.script: dict[str, str] = {}
        self.text = ""
        self._inside: str | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        self._inside = (dict(attrs).get("id") or "last") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            self.script[self._inside] = self.script.get(self._inside, "") + data

    def figures(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads(self.script["figures"])
        return list(found.values())


ROWS = 24


class Pool:
    """A pool whose ids, sources and texts hold markup; a run of the stage over as much of it as is asked for."""

    def __init__(self, folder: Path, rows: int = ROWS) -> None:
        rng = np.random.default_rng(0)
        self.folder, self.ids = folder, [f"r{row:03d}" for row in range(rows)]
        self.sources = [BAD if row % 2 else "plain" for row in range(rows)]
        self.texts = [f"{BAD} number {row} of {rows}: word{row % 5} and word{row % 7}" for row in range(rows)]
        self.feature = rng.normal(size=(rows, 8)).astype(np.float32)
        self.column = rng.normal(size=(rows, 2)).astype(np.float32)
        target = [f"t{row}" for row in range(3)]
        self.given = {
            "pool_tokens": tokens_table(folder / "p", self.ids, [3 + row % 9 for row in range(rows)], self.sources),
            "target_tokens": tokens_table(folder / "t", target, [4, 5, 6], ["<b>math</b>", "code", "code"]),
            "scores": scored_table(folder / "s", self.ids, self.column),
            "features": features_table(folder / "f", self.ids, self.feature),
            "pool": examples_table(folder / "pe", self.ids, self.texts, self.sources),
            "target": examples_table(folder / "te", target, [f"{BAD} target"] * 3, ["code"] * 3),
        }

    def run(self, name: str, *without: str, **config: Any) -> tuple[LocalWork, Summary, Page]:
        work = work_for(STAGE, self.folder / name)
        given = {key: value for key, value in self.given.items() if key not in without}
        summary = STAGE.run(SelectSlice(seed=1, select=SelectConfig(**config)), inputs_of(**given), work)
        assert work.measured("selection", PICTURE).read_bytes().startswith(b"\x89PNG")
        return work, summary, Page(work.measured("selection", PAGE))


def points_of_page(page: Page) -> dict[str, int]:
    traces = [trace for figure in page.figures() for trace in figure["data"] if trace.get("mode") == "markers"]
    return {trace["name"]: len(trace["x"]) for trace in traces[: len({trace["name"] for trace in traces})]}


def test_the_page_holds_all_of_it_and_no_text_of_the_data_becomes_markup(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    work, summary, page = pool.run("all", count=6)
    assert page.elements.count("script") == 3
    assert "img" not in page.elements
    assert "alert(1)" in page.text  # shown, as text
    hovers = [text for figure in page.figures() for trace in figure["data"] for text in trace.get("text", [])]
    assert len(hovers) == ROWS + (ROWS + 3)  # the map of features, then that of texts with the target's rows
    assert all("<script" not in text and "<img" not in text for text in hovers)
    assert all(re.sub(r"<br>", "", text).count("<") == 0 for text in hovers)
    labels = [str(label) for figure in page.figures() for trace in figure["data"] for label in trace["y"]]
    assert not [label for label in labels if "<" in label]
    titles = [table.title for table in summary.tables]
    for title in ("Composition by length", "Composition by group", "Coverage of target groups"):
        assert title in titles
        assert title in page.text
    assert "<b>math</b>" in page.text  # the group's name, from the target's sources
    (near,) = [table for table in summary.tables if table.title.startswith("Nearest rejected")]
    chosen = {row["example_id"] for row in work.rows("selection")}
    mean = {name: float(value) for name, value in zip(pool.ids, pool.column.mean(axis=1), strict=True)}
    best = sorted((name for name in pool.ids if name not in chosen), key=lambda name: -mean[name])[:10]
    assert [row[1] for row in near.rows] == best
    assert near.rows[0][3].startswith("<script>")
    assert gzip.decompress(base64.b64decode(page.script["library"])).decode() == get_plotlyjs()
    assert work.measured("selection", PAGE).stat().st_size < 3_000_000


def test_both_files_stay_outside_the_digest_and_the_table_does_not_depend_on_the_texts(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    work, _, _ = pool.run("with", count=6)
    bare, _, _ = pool.run("without", "pool", "target", count=6)
    assert work.artifact("selection").ref.digest == bare.artifact("selection").ref.digest


@pytest.mark.parametrize(
    ("without", "planes"),
    [
        (("pool", "target"), ["Map of features"]),
        (("features",), ["Map of texts"]),
        (("features", "pool", "target"), ["Map: score against length"]),
        (("features", "pool", "target", "scores"), []),
        (("scores", "target_tokens", "target"), ["Map of features", "Map of texts"]),
    ],
)
def test_the_page_is_made_of_what_there_is(tmp_path: Path, without: tuple[str, ...], planes: list[str]) -> None:
    selector = {"method": "random" if "scores" in without else "top_k"}
    _, _, page = Pool(tmp_path).run("some", *without, selector=selector, count=5)
    assert re.findall(r"Map[a-z :]*", page.text) == planes
    if planes and "target" not in without:
        assert points_of_page(page) == {"pool": ROWS - 5, "chosen": 5, "target": 3}


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (3, 3)])
def test_one_row_and_all_rows_make_a_page_too(tmp_path: Path, rows: int, count: int) -> None:
    _, summary, page = Pool(tmp_path, rows).run("few", count=count)
    assert "Composition by source" in page.text
    assert not [table for table in summary.tables if table.title.startswith("Nearest rejected")]


def test_rows_dropped_as_noise_are_points_of_their_own(tmp_path: Path) -> None:
    _, _, page = Pool(tmp_path).run("noise", noise={"method": "answer_fit", "drop": 0.25}, count=5)
    assert points_of_page(page) == {"pool": ROWS - 11, "dropped as noise": 6, "chosen": 5}
