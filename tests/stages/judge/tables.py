"""Evaluation tables written by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from data_contracts.tables import EVALUATION
from stages.judge.evidence import Evidence


def rows(model, losses, *, suite="perplexity", tokens=None, sources=None, scores=None):
    """Return evaluation rows of one model; `losses` are nats over the item's answer tokens."""
    return [
        {
            "suite": suite,
            "model": model,
            "item_id": f"{i:04d}",
            "source": sources[i] if sources else "one",
            "score": scores[i] if scores is not None else None if loss is None else -loss,
            "loss_sum": loss,
            "answer_tokens": tokens[i] if tokens else 1,
            "prediction": "",
            "extracted": None,
            "log_likelihoods": [],
            "note": "",
        }
        for i, loss in enumerate(losses)
    ]


def table(*parts):
    every = sorted((row for part in parts for row in part), key=lambda r: (r["suite"], r["model"], r["item_id"]))
    return pa.Table.from_pylist(every, schema=EVALUATION.schema)


def evidence(*parts, **settings):
    settings = {"holdout_items": 30, "training_rows": 100, **settings}
    return Evidence(table(*parts), **settings)


def losses(seed, mean, items=40):
    return (mean + np.random.default_rng(seed).normal(0, 0.1, items)).tolist()
