"""The validation loss and its error against a bootstrap over documents, and batch against single documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.meter.flops import FlopCounter, FlopModel
from stages.train.validate import Validation, ratio_estimate
from stages.workers.group import Group
from tests.local_work import LocalWork
from tests.stages.train.small import llama, token_columns


def test_the_standard_error_is_that_of_a_bootstrap_over_documents():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 30, 400)
    sums = counts * (2.0 + 0.5 * rng.standard_normal(400))  # tokens of a document share their deviation
    found = ratio_estimate(torch.tensor(sums), torch.tensor(counts))
    draws = rng.integers(0, 400, (4000, 400))
    resampled = sums[draws].sum(1) / counts[draws].sum(1)
    assert found.mean == pytest.approx(sums.sum() / counts.sum(), rel=1e-12)
    assert found.se == pytest.approx(resampled.std(), rel=0.05)
    unclustered = 0.5 / math.sqrt(counts.sum())
    assert found.se > 2 * unclustered


def test_one_document_has_no_error_and_no_token_has_no_loss():
    one = ratio_estimate(torch.tensor([3.0]), torch.tensor([2]))
    assert (one.mean, one.se, one.documents, one.answer_tokens) == (1.5, None, 1, 2)
    assert math.isnan(ratio_estimate(torch.tensor([0.0]), torch.tensor([0])).mean)


def test_a_non_finite_document_makes_the_loss_not_finite():
    assert not ratio_estimate(torch.tensor([1.0, math.nan]), torch.tensor([2, 2])).finite


def test_batches_do_not_change_the_loss_and_their_operations_are_those_that_run(tmp_path):
    work = LocalWork(tmp_path, {"tokens": "tokens"})
    work.table("tokens", token_columns(11, 4))
    path = work.artifact("tokens").folder / "data.arrow"
    model = llama().eval()
    meter = FlopModel.trace(model, train=False)
    losses = []
    for batch_tokens in (1, 50, 10_000):
        validation = Validation(path, None, batch_tokens)
        with FlopCounter() as counter:
            losses.append(validation(model, Group(), "float32")[0])
        assert validation.flops(meter) == counter.total
    assert [loss.mean for loss in losses] == pytest.approx([losses[0].mean] * 3, rel=1e-5)
    assert [loss.se for loss in losses] == pytest.approx([losses[0].se] * 3, rel=1e-4)
    assert losses[0].documents == 11


def test_fewer_rows_are_the_first_by_id(tmp_path):
    work = LocalWork(tmp_path, {"tokens": "tokens"})
    columns = token_columns(11, 4)
    work.table("tokens", columns)
    validation = Validation(work.artifact("tokens").folder / "data.arrow", 4, 100)
    assert validation.documents == 4
    assert validation.tokens == sum(columns["n_tokens"][:4])
