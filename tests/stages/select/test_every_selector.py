"""What holds of every selector there is, on whatever pool: found by name, so that a new one is held to it too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_contracts.errors import InputError
from data_contracts.method import find, names
from stages.select.selector import Selector
from tests.stages.select.pools import chosen, pool_of

FORMS: dict[str, list[dict[str, Any]]] = {
    "top_k": [{}, {"over": "round_robin"}, {"over": "max"}, {"over": "threshold", "quantile": 0.5}],
    "facility_location": [{}, {"epsilon": 0.2}],
    "difficulty": [{}, {"form": "proportional"}, {"form": "uniform"}],
    "stratified": [{"strata": 3}, {"cut": "quantile", "budget": "proportional", "drop": 0.2}],
    "speculative_strata": [{"strata": 3}, {"within": "top", "drop": 0}],
    "feature_based": [{}, {"concave": "log"}],
    "medoids": [{}, {"small": 0.4}],
    "dpp": [{}, {"strength": 1.0}],
    "grad_match": [{}, {"ridge": 0}],
    "trajectory_clusters": [{"clusters": 3}, {"clusters": 2, "scaled": True}],
}
CASES = [(name, form) for name in names(Selector) for form in FORMS.get(name, [{}])]
FALLING = {"facility_location", "graph_cut", "feature_based", "craig", "dpp", "k_center"}
SUPPORTED = {"top_k", "facility_location", "bids", "trajectory_clusters", "semdedup", "random"}


@pytest.mark.parametrize(("name", "form"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
@given(
    rows=st.integers(1, 14),
    count=st.integers(1, 17),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["random", "equal", "zeros", "ties", "tokens"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_row_twice_none_too_many_and_the_same_again(
    name: str, form: dict[str, Any], rows: int, count: int, seed: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    feature, column = rng.normal(size=(rows, 3)), rng.random((rows, 2))
    if kind == "equal":
        feature[:], column[:] = feature[0], 0.5
    elif kind == "zeros":
        feature[rng.random(rows) < 0.5] = 0
    elif kind == "ties":
        feature, column = rng.integers(0, 2, (rows, 3)).astype(float), rng.integers(0, 2, (rows, 2)).astype(float)
    source = [f"s{number}" for number in rng.integers(3, size=rows)]
    exact = rng.random(rows) < 0.5
    exact[column.mean(axis=1).argmin()] = True  # the lowest is never dropped
    pool = pool_of(column=column, feature=feature, source=source, exact=exact, length=[10] * rows)
    quota = {"tokens": 10 * count + 5} if kind == "tokens" else {"count": count}
    notices: list[str] = []
    try:
        found = chosen(pool, name, **form, **quota, notices=notices)
    except InputError:
        assert name in ("grad_match", "dpp")  # features that are all zero, or add up to it
        assert not np.abs(feature.mean(axis=0)).max() > 1e-9
        return
    assert len(set(found.rows.tolist())) == len(found.rows) <= min(count, rows)
    assert found.rows.tolist() == chosen(pool, name, **form, **quota).rows.tolist()
    assert len(found.rows) == min(count, rows) or "rows were chosen of" in notices[0]
    if kind != "tokens":
        assert bool(notices) == (len(found.rows) < count)
    table = found.table.to_pydict()
    np.testing.assert_allclose(np.mean(table["weight"]), 1, rtol=1e-5)
    assert all(reason and "{" not in reason for reason in table["reason"])
    if name in FALLING and not form.get("epsilon"):
        assert (np.diff(table["gain"]) <= 1e-5).all()


def test_the_supported_ones_are_those_that_the_documentation_says() -> None:
    assert {name for name in names(Selector) if find(Selector, name).supported} == SUPPORTED
