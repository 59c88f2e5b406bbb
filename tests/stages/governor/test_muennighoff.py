"""Muennighoff's law against the value its authors publish, its own integral, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from stages.governor.laws.muennighoff import DATA_DECAY, Muennighoff, effective

LAW = Muennighoff()


def test_the_published_value_comes_out_to_a_billionth():
    """6.34e9 parameters, 242e9 tokens, 25e9 of them unique: the point of their figure 1, printed by their notebook."""
    assert LAW.loss(6.34e9, 242e9, 25e9) == pytest.approx(2.2256440889984477, abs=1e-9)


@settings(deadline=None)
@given(st.floats(1.0, 1e12), st.floats(0.0, 100.0))
def test_each_repetition_is_worth_less_by_an_exponential(unique, repetitions):
    added, _ = quad(lambda r: math.exp(-r / DATA_DECAY), 0, repetitions)
    assert effective(unique, repetitions, DATA_DECAY) == pytest.approx(unique * (1 + added), rel=1e-9)


def test_four_passes_are_almost_fresh_and_forty_are_not():
    assert effective(1.0, 3.0, DATA_DECAY) / 4 > 0.92
    assert effective(1.0, 39.0, DATA_DECAY) / 40 < 0.4
    assert effective(1.0, 1e6, DATA_DECAY) == pytest.approx(1 + DATA_DECAY)


def test_fresh_data_and_few_parameters_give_the_plain_law():
    parameters, tokens = 1e8, 1e12
    plain = math.exp(0.6254804) + math.exp(6.255414) * parameters**-0.3526596 + math.exp(7.3049974) * tokens**-0.3526596
    assert LAW.loss(parameters, tokens, tokens) == pytest.approx(plain, rel=1e-12)
    assert LAW.loss(parameters, tokens, 2 * tokens) == pytest.approx(plain, rel=1e-12)  # no more are unique than seen


def test_unique_tokens_support_a_twentieth_as_many_parameters():
    assert LAW.supported_parameters(1e9) == pytest.approx(0.051e9, rel=0.01)  # as published: U_N = 0.051 U_D
    assert LAW.supported_parameters(3e11) / 3e11 == pytest.approx(math.exp((6.255414 - 7.3049974) / 0.3526596))


def test_the_parameters_that_data_supports_are_optimal_at_equal_compute():
    unique = 25e9
    best = LAW.supported_parameters(unique)
    share = np.geomspace(0.5, 2.0, 41)  # C = 6 N D is kept
    losses = [LAW.loss(best * s, unique / s, unique / s) for s in share]
    plain = np.exp(LAW.log_a) / (best * share) ** LAW.alpha + np.exp(LAW.log_b) / (unique / share) ** LAW.beta
    assert int(np.argmin(plain)) == 20
    assert losses[20] == pytest.approx(float(plain[20] + np.exp(LAW.log_e)), rel=1e-12)
