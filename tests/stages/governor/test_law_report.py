"""What a law says of a table: against tables made by a law that is known, and files that are not tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_contracts.errors import InputError
from stages.governor.law_report import by_compute, compute_of, read_runs, report
from stages.governor.laws.chinchilla import Chinchilla
from stages.governor.laws.compression import Compression
from stages.governor.laws.muennighoff import Muennighoff


def table_of(law: Chinchilla, count: int = 40, noise: float = 0.004) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    runs = {"parameters": 10 ** rng.uniform(7, 9, count), "tokens": 10 ** rng.uniform(8.5, 10.5, count)}
    return {**runs, "loss": law.predict(runs) * np.exp(noise * rng.standard_normal(count))}


def test_a_simulated_table_gives_back_its_law_and_what_more_compute_buys() -> None:
    law, runs = Chinchilla(), table_of(Chinchilla())
    told = report(Chinchilla(log_e=0.2, alpha=0.3), runs, flops=1e21)
    assert (told.law, told.runs, told.why_not) == ("chinchilla", 40, "")
    for one in told.constants:
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.value < one.high
    assert told.held_out is not None
    assert told.expected is not None
    assert told.optimal is not None
    assert told.held_out.runs == 8
    assert told.held_out.error < 0.05
    assert 0.4 < told.held_out.coverage <= 1
    parameters, tokens = law.optimal(1e21)
    truth = law.predict({"parameters": [parameters], "tokens": [tokens]})[0]
    assert told.expected.low < truth < told.expected.high
    assert 6 * told.optimal["parameters"] * told.optimal["tokens"] == pytest.approx(1e21)
    assert told.expected.split == told.optimal


def test_at_one_size_the_parameters_term_is_kept_and_the_run_asked_for_is_what_is_expected() -> None:
    law = Chinchilla()
    runs = {"parameters": np.full(20, 1e8), "tokens": np.linspace(1e9, 1e10, 20)}
    told = report(law, {**runs, "loss": law.predict(runs)}, flops=6e18, given={"parameters": 1e8, "tokens": 2e10})
    kept = {one.name: one.value for one in told.constants if one.low is None}
    assert kept == {"log_a": law.log_a, "alpha": law.alpha}
    assert told.expected is not None
    assert told.expected.loss == pytest.approx(law.predict({"parameters": [1e8], "tokens": [2e10]})[0], rel=1e-3)


def test_repeated_tokens_are_expected_as_they_are_asked_for() -> None:
    law, runs = Muennighoff(), table_of(Chinchilla())
    runs["unique"] = runs["tokens"] / 2
    fresh, repeated = (report(law, runs, flops=1e20, unique=unique, resamples=4).expected for unique in (None, 1e8))
    assert fresh is not None
    assert repeated is not None
    assert fresh.split["unique"] == fresh.split["tokens"]
    assert repeated.split["unique"] == 1e8
    assert repeated.loss > fresh.loss


def test_other_laws_split_compute_in_their_own_columns() -> None:
    law, rng = Compression(), np.random.default_rng(2)
    runs = {"flops": 10 ** rng.uniform(18, 21, 30), "compression": rng.uniform(2, 9, 30)}
    told = report(law, {**runs, "loss": law.predict(runs)}, flops=1e21)
    assert told.optimal is not None
    assert told.expected is not None
    assert set(told.optimal) == {"parameters", "bytes", "compression"}
    assert told.expected.loss == pytest.approx(3342 * 1e21**-0.206 + 0.70, rel=2e-3)


def test_the_runs_held_out_are_those_of_most_compute() -> None:
    runs = {"parameters": np.array([1.0, 5.0, 2.0, 4.0, 3.0]), "tokens": np.ones(5), "loss": np.ones(5)}
    first, rest = by_compute(runs)
    assert first["parameters"].tolist() == [1, 2, 3, 4]
    assert rest["parameters"].tolist() == [5]
    assert compute_of({"parameters": np.array([2.0]), "batch": np.array([3.0]), "steps": np.array([5.0])}) == [180.0]
    assert compute_of({**runs, "flops": np.array([7.0])}) == [7.0]
    with pytest.raises(InputError, match="compression"):
        compute_of({"compression": np.ones(2)})


def test_too_few_runs_to_hold_any_out_are_said() -> None:
    told = report(Chinchilla(), {name: values[:6] for name, values in table_of(Chinchilla()).items()})
    assert told.held_out is None
    assert "4 run(s) for 5 constants" in told.why_not


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("parameters,tokens,loss\n1e8,1e9,3\n1e8,many,3\n", "runs.csv, line 3, column tokens: 'many'"),
        ("parameters,tokens,loss\n1e8,1e9,3\n1e8,,3\n", "runs.csv, line 3, column tokens: nothing"),
        ("parameters,tokens,loss\n1e8,1e9,0\n", "runs.csv, line 2, column loss: '0'"),
        ("parameters,tokens,loss\n1e8,1e9\n", "runs.csv, line 2, column loss: nothing"),
        ("parameters,tokens,loss\n1e8,inf,3\n", "runs.csv, line 2, column tokens: 'inf'"),
        ("parameters,tokens\n1e8,1e9\n", "runs.csv begins with parameters, tokens"),
        ("parameters,tokens,loss\n", "runs.csv has none below its first line"),
        ("", "runs.csv begins with nothing"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_line_and_column(tmp_path: Path, written: str, found: str) -> None:
    (tmp_path / "runs.csv").write_text(written)
    with pytest.raises(InputError) as raised:
        read_runs(tmp_path / "runs.csv")
    assert raised.value.found == found


def test_columns_that_no_law_reads_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("\ufeffname,parameters,tokens,loss\na,1e8,1e9,3.5\n", encoding="utf-8")
    assert {name: values.tolist() for name, values in read_runs(tmp_path / "runs.csv").items()} == {
        "parameters": [1e8], "tokens": [1e9], "loss": [3.5]
    }  # fmt: skip
    with pytest.raises(InputError, match=r"absent\.csv"):
        read_runs(tmp_path / "absent.csv")
