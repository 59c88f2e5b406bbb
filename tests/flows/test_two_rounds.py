"""Two rounds of a real chain of stages: the second is predicted from a glance, a sample and the first's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import spearmanr

from benchmarks.chain import Chain
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.records import Result
from tests.flows.small_run import lay_out

PREDICT = {"method": "proxy_verify", "sample": 0.6, "glance": 0.2, "tokens": 0.9, "least": -1}


@pytest.mark.slow
@pytest.mark.shared
def test_the_second_round_predicts_what_it_does_not_compute_and_records_what_that_cost(
    shared: Path, tmp_path: Path
) -> None:
    sections = {"score": {"coverage": PREDICT}, "plan": {"precision": "float32"}, "train": {"evaluations": 1}}
    path = lay_out(tmp_path, shared, **sections)
    chain = Chain(tmp_path, yaml.safe_load(path.read_text(encoding="utf-8")))
    config = chain.config()
    data = chain.call("ingest", config)
    base, pool, target = (data.ref(name) for name in ("base", "pool_tokens", "target_tokens"))
    validation = data.ref("validation_tokens")
    plan = chain.call("plan", config, base=base, pool=data.ref("pool"), pool_tokens=pool, target_tokens=target)
    asked: dict[str, Any] = {"base": base, "plan": plan.ref("plan"), "pool_tokens": pool}
    begun = chain.call("begin", config, **asked, validation_tokens=validation)
    asked["target_tokens"] = target

    def scored(checkpoint: Any, earlier: Any, **coverage: Any) -> tuple[Result, dict[str, list[Any]]]:
        own = chain.config(score={"coverage": coverage}) if coverage else config
        result = chain.call("score", own, **asked, checkpoint=checkpoint, previous_scores=earlier)
        return result, read_table(chain.store.open(result.refs["scores"]) / TABLE_FILE).to_pydict()

    first, before = scored(begun.ref("checkpoint"), ())
    assert all(before["exact"])
    selected = chain.call("select", config, pool_tokens=pool, scores=first.ref("scores"))
    trained = chain.call(
        "train",
        config,
        base=base,
        plan=plan.ref("plan"),
        tokens=pool + target,
        selection=selected.ref("selection"),
        validation_tokens=validation,
        target_tokens=target,
        checkpoint=begun.ref("checkpoint"),
    )
    second, after = scored(trained.ref("checkpoint"), first.ref("scores"))
    _, whole = scored(trained.ref("checkpoint"), (), method="full")
    manifest = chain.store.read_manifest(second.run)
    facts = manifest.summary.facts
    computed = np.array(after["exact"])
    assert manifest.inputs["previous_scores"] == first.ref("scores")
    assert trained.refs["checkpoint"].digest != begun.refs["checkpoint"].digest
    assert 24 <= computed.sum() < len(computed)
    assert facts["predicted"] == int((~computed).sum())
    assert facts["fallback"] is False
    assert isinstance(facts["cross_validated_spearman"], float)
    # what is exact is what a whole scoring of the drifted model says; what is predicted follows it
    now, then, fresh = (np.array(table["score"]) for table in (after, before, whole))
    np.testing.assert_allclose(now[computed], fresh[computed], atol=1e-3 * np.abs(fresh).max())
    share = computed.mean()
    assert facts["estimated_spearman"] == pytest.approx(
        share + (1 - share) * facts["cross_validated_spearman"], abs=1e-3
    )
    found = spearmanr(now, fresh).statistic
    assert found > spearmanr(then, fresh).statistic
    assert found > 0.8
    spent = manifest.costs["score"]
    assert spent.flops == manifest.summary.measured["flops"] > 0
    assert spent.peak_bytes > 0
    agreement = {row[0]: row for table in manifest.summary.tables for row in table.rows}
    assert any("earlier scores, 1 back" in str(name) for name in agreement)
