"""What a user sees of a run's course: every number against the evaluations it is of, and a page no text can break."""

from __future__ import annotations

import numpy as np
import pytest

from data_contracts.arrow import write_table
from data_contracts.config import GovernConfig
from stages.govern.page import PAGE, PICTURE
from stages.govern.stage import CHOICES
from stages.train.rows import CHOICES as SCHEMA
from tests.stages.govern.test_stage import GOOD, WARMUP, govern, ledger
from tests.stages.governor.test_policies import FLOPS, segment
from tests.stages.select.test_view import Page


def falling(units):
    """A power law of the run's FLOPs in units, through 2.1 at 6 of them, where the third segment starts."""
    return 1.0 + 1.1 * (units / 6) ** -0.8


FALLING = [falling(6 + n) for n in range(1, 13)]
REASON = "<b>rose</b> & fell"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The third decision of a run of three segments, whose second was ended inside: decision, summary and page."""
    folder, spent = tmp_path_factory.mktemp("course"), ledger(warm_up=2 * FLOPS, score=3 * FLOPS, train=16 * FLOPS)
    first, _ = govern(folder / "a", [WARMUP])
    second, _ = govern(folder / "b", [WARMUP, GOOD], first, spent)
    choices = {"step": [30, 60], "action": ["continue", "end"], "reason": ["on", REASON]}

    def beside(maker):
        write_table(maker.measured("curve1", CHOICES), SCHEMA, choices)

    segments = [WARMUP, GOOD, segment(FALLING, start=60)]
    decision, summary = govern(folder / "c", segments, second, spent, beside=beside)
    place = folder / "c" / "work" / "outputs" / "decision" / "measured"
    assert (place / PICTURE).read_bytes().startswith(b"\x89PNG")
    return decision, summary, Page(place / PAGE), (first, second)


def table(summary, title):
    return next(table for table in summary.tables if table.title == title)


def test_each_decision_stands_where_it_was_made_with_its_reason(told):
    decision, summary, page, (first, second) = told
    assert table(summary, "Decisions").rows == (
        ("after segment 0, step 20", 3.5, "reselect", first.reason),
        ("in segment 1, step 60", 2.1, "end", REASON),
        ("after segment 1, step 60", 2.1, second.action, second.reason),
        ("after segment 2, step 180", pytest.approx(FALLING[-1]), decision.action, decision.reason),
    )
    (markers,) = [trace for trace in page.figures()[0]["data"] if trace["name"] == "decisions"]
    assert markers["x"] == [2 * FLOPS, 6 * FLOPS, 6 * FLOPS, 18 * FLOPS]
    assert markers["text"][1] == "end: &lt;b&gt;rose&lt;/b&gt; &amp; fell"
    assert REASON in page.text
    assert "b" not in page.elements


def test_the_curve_is_every_evaluation_and_the_band_reaches_to_the_end_of_what_may_be_spent(told):
    decision, summary, page, _ = told
    traces = {trace["name"]: trace for trace in page.figures()[0]["data"]}
    assert traces["segment 2: reselect"]["y"] == pytest.approx(FALLING)
    assert traces["segment 2: reselect"]["x"] == [(6 + n) * FLOPS for n in range(1, 13)]
    end = 18 * FLOPS + decision.numbers["spendable_flops"]
    assert traces["fitted"]["x"][-1] == pytest.approx(end)
    low, high = np.array(traces["80 %"]["y"][60:][::-1]), np.array(traces["80 %"]["y"][:60])
    middle = np.array(traces["fitted"]["y"])
    assert ((low <= middle) & (middle <= high)).all()
    assert middle == pytest.approx([falling(flops / FLOPS) for flops in traces["fitted"]["x"]], abs=0.02)
    rows = table(summary, "Fitted curve").rows
    assert [row[0] for row in rows] == pytest.approx(np.linspace(18 * FLOPS, end, 5), abs=1)
    assert [row[1] for row in rows] == pytest.approx([falling(row[0] / FLOPS) for row in rows], abs=0.02)
    assert all(low <= middle <= high for _, middle, low, high in rows)
    assert rows[-1][1] == pytest.approx(traces["fitted"]["y"][-1])


def test_what_the_rest_is_expected_to_buy_is_near_what_the_planted_curve_gives(told):
    decision, summary, _, _ = told
    rows = {row[0]: row[1:] for row in table(summary, "What the rest is expected to buy").rows}
    flops, middle, low, high = rows["all that is left, on the same data"]
    assert flops == decision.numbers["spendable_flops"]
    truth = FALLING[-1] - falling(18 + flops / FLOPS)
    assert low <= middle <= high
    assert middle == pytest.approx(truth, rel=0.1)
    assert f"{middle:.3g} nats" in summary.facts["all that is left would bring"]


def test_the_gain_at_the_last_evaluation_is_the_slope_of_the_last_five(told):
    _, summary, page, _ = told
    (line,) = page.figures()[1]["data"]
    slope = np.polyfit(np.arange(5) * FLOPS, FALLING[-5:], 1)[0]
    assert line["x"][-1] == 18 * FLOPS
    assert line["y"][-1] == pytest.approx(-slope, rel=1e-6)
    flops, rate, low, high = table(summary, "Marginal gain").rows[-1]
    assert (flops, rate) == (18 * FLOPS, pytest.approx(-slope, rel=1e-6))
    assert low <= rate <= high


def test_flops_by_cause_are_the_ledgers(told):
    _, summary, page, _ = told
    causes = table(summary, "FLOPs by cause")
    assert [(row[0], row[1]) for row in causes.rows] == [
        ("train", 16 * FLOPS),
        ("score", 3 * FLOPS),
        ("warm_up", 2 * FLOPS),
    ]
    assert sum(row[2] for row in causes.rows) == pytest.approx(1, abs=1e-3)
    (bars,) = page.figures()[2]["data"]
    assert (bars["y"], bars["x"]) == (["train", "score", "warm_up"], [16 * FLOPS, 3 * FLOPS, 2 * FLOPS])


def test_too_few_evaluations_a_maximised_metric_and_a_broken_loss_make_a_page_too(tmp_path):
    _, summary = govern(tmp_path / "few", [segment([3.0], phase="warmup")])
    assert table(summary, "What the rest is expected to buy").rows[-1][2] is None
    assert table(summary, "Segments").rows[0][-1] == "▁"
    turned = GovernConfig(metric="train_loss", direction="maximise").model_dump()
    _, summary = govern(tmp_path / "turned", [WARMUP], **turned)
    assert table(summary, "Decisions").rows[0][1] == 1.0
    _, summary = govern(tmp_path / "broken", [segment([3.0, float("nan")], phase="warmup")])
    assert table(summary, "Decisions").rows[0][:3] == ("after segment 0, step 20", None, "stop")
