"""Loss laws against published values, closed forms and simulated tables whose constants are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import zeta

from data_contracts.errors import InputError
from data_contracts.method import find, names, resolve
from stages.governor.law import LossModel, history
from stages.governor.laws import kaplan
from stages.governor.laws.chinchilla import HOFFMANN, Chinchilla
from stages.governor.laws.compression import SUBWORD, SUBWORD_SPLIT, Compression, optimal_split
from stages.governor.laws.kaplan import Kaplan
from stages.governor.laws.muennighoff import Muennighoff
from stages.governor.laws.noisy_quadratic import LEARNING_RATE, NoisyQuadratic, _tail
from stages.governor.state import State


def simulated(law, seed, noise=0.005, count=80):
    rng = np.random.default_rng(seed)
    table = {"parameters": 10 ** rng.uniform(7, 10, count), "tokens": 10 ** rng.uniform(8.5, 11.5, count)}
    return {**table, "loss": law.predict(table) * np.exp(noise * rng.standard_normal(count))}


def test_every_law_of_the_family_can_be_asked_for_by_name():
    for name in names(LossModel):
        law = resolve(LossModel, {"method": name}, "law")
        assert isinstance(law, find(LossModel, name))
        assert law.reads


def test_chinchillas_published_constants_give_the_loss_of_the_model_named_chinchilla():
    # 70e9 parameters, 1.4e12 tokens: the terms worked out by hand, 1.69 + 0.0834 + 0.1627
    assert HOFFMANN.predict({"parameters": [70e9], "tokens": [1.4e12]})[0] == pytest.approx(1.9366, abs=2e-3)


def test_the_refit_asks_for_twenty_tokens_a_parameter_at_chinchillas_budget():
    parameters, tokens = Chinchilla().optimal(5.76e23)
    assert 15 < tokens / parameters < 27  # Besiroglu et al.: about 20
    slope = math.log(Chinchilla().optimal(1e24)[0] / Chinchilla().optimal(1e20)[0]) / math.log(1e4)
    assert slope == pytest.approx(0.513, abs=1e-3)


@given(st.floats(16, 25), st.floats(0.1, 0.6), st.floats(0.1, 0.6))
def test_no_other_split_of_the_flops_reaches_a_lower_loss_than_the_closed_form(log_flops, alpha, beta):
    flops, law = 10**log_flops, Chinchilla(alpha=alpha, beta=beta)
    parameters, tokens = law.optimal(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    other = parameters * np.exp(np.linspace(-2, 2, 401))
    assert law.predict({"parameters": [parameters], "tokens": [tokens]})[0] <= (
        law.predict({"parameters": other, "tokens": flops / 6 / other}).min() + 1e-12
    )


def test_the_bounded_search_finds_the_closed_form_of_chinchilla():
    searched, exact = LossModel.optimal(Chinchilla(), 1e21), Chinchilla().optimal(1e21)
    assert searched == pytest.approx(exact, rel=1e-3)


def test_the_refit_of_a_simulated_law_holds_e_alpha_and_beta_within_its_bootstrap_interval():
    """Of 20 tables; a share of 80 or 95 % has a standard error of 9 or 5 points over so many, and three are allowed.

    They held 80 and 97 % when this was written, of ten tables more 77 and 93 %.
    """
    law, held = Chinchilla(), {0.8: [], 0.95: []}
    for seed in range(20):
        fitted = law.fit(simulated(law, seed), np.random.default_rng(seed), resamples=60)
        for constant in ("log_e", "alpha", "beta"):
            for level, found in held.items():
                low, high = fitted.interval(constant, level)
                found.append(low < getattr(law, constant) < high)
                assert high - low < 1.0 * abs(getattr(law, constant))
    assert 0.53 < np.mean(held[0.8]) < 0.97
    assert np.mean(held[0.95]) > 0.80
    assert np.mean(held[0.8]) < np.mean(held[0.95])


def test_a_law_without_noise_is_found_again_from_far_away():
    truth = Chinchilla(log_e=0.3, log_a=5.0, log_b=8.0, alpha=0.28, beta=0.45)
    fitted = Chinchilla().fit(simulated(truth, 5, noise=0.0), np.random.default_rng(0), resamples=1)
    for constant, value in truth.constants().items():
        assert getattr(fitted.law, constant) == pytest.approx(value, rel=2e-3)


def test_one_wild_run_in_ten_moves_the_fit_less_than_it_moves_least_squares():
    truth = Chinchilla()
    table = simulated(truth, 7, noise=0.002)
    table["loss"][::10] *= 1.3
    fitted = truth.fit(table, np.random.default_rng(0), resamples=1)
    clean = np.arange(len(table["loss"])) % 10 != 0
    assert np.median(np.abs(fitted.residual_R[clean])) < 0.004


def test_held_out_larger_runs_fall_into_the_interval_about_as_often_as_it_says():
    law, inside = Chinchilla(), []
    far = {"parameters": np.full(20, 5e10), "tokens": np.full(20, 1e12)}
    for seed in range(4):
        fitted = law.fit(simulated(law, 20 + seed), np.random.default_rng(seed), resamples=40)
        seen = law.predict(far) * np.exp(0.005 * np.random.default_rng(seed).standard_normal(20))
        error, coverage = fitted.score({**far, "loss": seen})
        inside.append(coverage)
        assert error < 0.1
    assert 0.5 <= np.mean(inside) <= 1.0


def test_what_one_runs_own_history_cannot_tell_keeps_its_value():
    law = Chinchilla()
    tokens = np.linspace(1e9, 2e10, 30)
    losses = Chinchilla(log_e=0.5).predict({"parameters": np.full(30, 1e8), "tokens": tokens})
    rows = [
        {"step": i, "tokens": int(t), "flops": int(6e8 * t), "validation_loss": float(y)}
        for i, (t, y) in enumerate(zip(tokens, losses, strict=True))
    ]
    fitted = law.fit(history(State.from_rows([rows]), 1e8), np.random.default_rng(0), resamples=5)
    assert fitted.free == ("log_e", "log_b", "beta")
    assert (fitted.law.log_a, fitted.law.alpha) == (law.log_a, law.alpha)
    ahead = {"parameters": [1e8], "tokens": [1e11]}
    assert fitted.law.predict(ahead)[0] == pytest.approx(Chinchilla(log_e=0.5).predict(ahead)[0], rel=1e-3)


@pytest.mark.parametrize("law", [Chinchilla(), Kaplan(), Muennighoff()], ids=lambda law: type(law).name())
def test_a_small_model_on_easy_text_is_fitted_though_its_published_parameters_term_lies_above_its_losses(law):
    """Chinchilla's A/N^α is 6.3 nats for 260,032 parameters, Kaplan's 4.3; this run falls from 4.5 to 2.3."""
    tokens = np.linspace(4e3, 8e4, 20)
    table = {"parameters": np.full(20, 260_032.0), "tokens": tokens, "unique": tokens, "loss": 1.0 + 100 * tokens**-0.4}
    fitted = law.fit(table, np.random.default_rng(0), resamples=10)
    seen = np.abs(np.log(law.predict(table)) - np.log(table["loss"])).min()
    assert seen > 0.5  # as published it is far off
    assert np.median(np.abs(fitted.residual_R)) < 0.01
    ahead = {name: [2 * values[-1]] for name, values in table.items() if name != "loss"} | {"parameters": [260_032.0]}
    assert fitted.law.predict(ahead)[0] == pytest.approx(1.0 + 100 * 1.6e5**-0.4, abs=0.12)


def test_a_table_that_cannot_be_fitted_says_what_is_missing():
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="tokens"):
        Chinchilla().fit({"parameters": [1e8], "loss": [3.0]}, rng)
    with pytest.raises(InputError, match="row 1"):
        Chinchilla().predict({"parameters": [1e8, 1e9], "tokens": [1e9, math.nan]})
    with pytest.raises(InputError, match="more runs"):
        Chinchilla().fit({"parameters": [1e8, 1e9], "tokens": [1e9, 1e10], "loss": [3.0, 2.5]}, rng)


def test_kaplans_published_laws_are_1_at_their_constants_and_fall_by_their_exponents():
    assert kaplan.loss_of_parameters(8.8e13) == kaplan.loss_of_tokens(5.4e13) == kaplan.loss_of_compute(3.1e8) == 1.0
    assert kaplan.loss_of_parameters(1.5e9) == pytest.approx(2.304, abs=2e-3)  # 58,667^0.076
    assert kaplan.loss_of_compute(1.0) == pytest.approx(2.658, abs=2e-3)  # (3.1e8)^0.05
    assert kaplan.critical_batch(1.0) == 2e8
    assert kaplan.loss_of_steps(6.5e13, 2.1e3) == 2.0
    assert kaplan.loss_of_tokens(1e10) == pytest.approx(2.26245, rel=1e-5)  # 5,400^0.095 = e^(0.095 · 8.594154)
    assert kaplan.critical_batch(2.0) == pytest.approx(7.3715e6, rel=1e-4)  # 2e8 / 2^4.761905, 2^4.761905 = 27.1317
    # 1,000^0.077 = 10^0.231 = 1.702159; 0.01^0.76 = 10^−1.52 = 0.030200
    assert kaplan.loss_of_steps(6.5e10, 2.1e5) == pytest.approx(1.702159 + 0.030200, rel=1e-5)
    assert kaplan.loss_of_steps(6.5e10, 2.1e3) == pytest.approx(2.702159, rel=1e-6)
    assert kaplan.loss_of_steps(6.5e13, 2.1e5) == pytest.approx(1.030200, rel=1e-6)


def test_the_best_size_grows_by_the_published_power_of_compute():
    assert kaplan.optimal_parameters(1.0) == 1.3e9
    assert kaplan.optimal_parameters(100.0) == pytest.approx(1.3e9 * 28.8403, rel=1e-5)  # 10^1.46


def test_kaplans_joint_law_meets_the_laws_of_one_quantity_at_its_ends():
    law = Kaplan()
    vast = law.predict({"parameters": [1e9], "tokens": [1e30]})[0]
    assert vast == pytest.approx((6.4e13 / 1e9) ** 0.076, rel=1e-6)
    wide = law.predict({"parameters": [1e40], "tokens": [1e9]})[0]
    assert wide == pytest.approx((1.8e13 / 1e9) ** 0.103, rel=1e-3)


def test_a_simulated_table_of_kaplans_law_is_predicted_beyond_its_range():
    truth = Kaplan(log_n=30.0, log_d=31.0, alpha_n=0.1, alpha_d=0.12)
    fitted = Kaplan().fit(simulated(truth, 3, noise=0.001), np.random.default_rng(0), resamples=5)
    ahead = {"parameters": [1e11], "tokens": [2e12]}
    assert fitted.law.predict(ahead)[0] == pytest.approx(truth.predict(ahead)[0], rel=0.005)


def test_the_best_compression_falls_with_compute_as_published():
    law = Compression()
    assert law.best_compression(1e20) == pytest.approx(3.69, rel=0.02)  # δ is printed to two digits
    assert law.best_compression(2e21) == pytest.approx(3.33, rel=0.02)
    best = law.best_compression(1e21)
    around = best * np.exp(np.linspace(-1, 1, 201))
    assert around[np.argmin(law.predict({"flops": np.full(201, 1e21), "compression": around}))] == pytest.approx(best)


def test_the_best_split_spends_the_flops_and_keeps_bytes_a_parameter():
    for flops, compression in ((1e20, 3.0), (1e22, 5.0)):
        parameters, bytes_ = optimal_split(flops, compression)
        assert 6 * parameters * bytes_ / compression == pytest.approx(flops)
        published = 9.5e-3 * flops ** (1 - 0.465) * compression ** (1 - 0.471)
        assert parameters == pytest.approx(published, rel=0.005)  # N0 is printed to two digits
    parameters, bytes_ = optimal_split(1e21, 4.57, **SUBWORD_SPLIT)
    # 6 B0² C^(2α−1) T^(2β−1) = 47.04 · 10^0.042 · 4.57^−0.108: 44, where the paper's text has about 60
    assert bytes_ / parameters == pytest.approx(47.04 * 1.101539 * 0.848650, rel=1e-5)
    assert 1 / (6 * SUBWORD_SPLIT["b0"]) == pytest.approx(0.059, rel=0.01)  # N0 as printed


def test_subword_tokenizers_have_their_own_fall_with_compute_and_the_same_best_compression():
    best = SUBWORD.best_compression(1e20)
    told = SUBWORD.predict({"flops": [1e20], "compression": [best]})[0]
    assert told == pytest.approx(1087 * 10**-3.62 + 0.70, rel=1e-9)  # 0.2608 + 0.70; no price at the best T
    assert Compression().predict({"flops": [1e20], "compression": [best]})[0] == pytest.approx(3342 * 10**-4.12 + 0.70)
    twice = SUBWORD.predict({"flops": [1e20], "compression": [2 * best]})[0]
    assert twice - told == pytest.approx(0.032 * math.log(2) ** 2, rel=1e-9)


@pytest.mark.parametrize("best", [4.58, 5.67])  # Arabic, Russian
def test_the_law_of_another_language_has_its_best_compression_where_it_was_seen(best):
    law = Compression().with_best(best, 1e21)
    around = best * np.exp(np.linspace(-1, 1, 201))
    loss = law.predict({"flops": np.full(201, 1e21), "compression": around})
    assert around[np.argmin(loss)] == pytest.approx(best)
    assert law.best_compression(1e22) == pytest.approx(best * 10**-0.035)
    english = Compression()
    at = {"flops": [1e21], "compression": [best]}
    least = english.predict({"flops": [1e21], "compression": [english.best_compression(1e21)]})
    assert law.predict(at)[0] == pytest.approx(least[0])


def test_the_best_of_the_bytes_law_is_the_least_of_its_compressions_and_spends_the_flops():
    law = Compression()
    parameters, bytes_, compression = law.optimal(1e21)
    assert 6 * parameters * bytes_ / compression == pytest.approx(1e21)
    every = np.linspace(1, 10, 5001)
    assert compression == pytest.approx(
        every[np.argmin(law.predict({"flops": np.full(5001, 1e21), "compression": every}))], abs=2e-3
    )
    assert law.optimal(1e21, compression=4.57, **SUBWORD_SPLIT)[:2] == optimal_split(1e21, 4.57, **SUBWORD_SPLIT)


def test_a_simulated_table_of_the_bytes_law_is_found_again():
    truth, rng = Compression(), np.random.default_rng(2)
    table = {"flops": 10 ** rng.uniform(18, 22, 60), "compression": rng.uniform(2, 9, 60)}
    start = Compression(log_l=7.0, gamma=0.17, log_f=-3.0, delta=0.03, log_t=2.7, log_e=-0.5)
    fitted = start.fit({**table, "loss": truth.predict(table)}, rng, resamples=1)
    ahead = {"flops": [1e23], "compression": [4.0]}
    assert fitted.law.predict(ahead)[0] == pytest.approx(truth.predict(ahead)[0], rel=1e-3)
    assert fitted.law.gamma == pytest.approx(truth.gamma, rel=0.01)


def test_muennighoffs_law_of_a_table_is_that_of_each_run():
    rng, law = np.random.default_rng(1), Muennighoff()
    table = {name: 10 ** rng.uniform(7, 11, 50) for name in ("parameters", "tokens", "unique")}
    alone = [law.loss(n, d, u) for n, d, u in zip(*table.values(), strict=True)]
    np.testing.assert_allclose(law.predict(table), alone, rtol=1e-12)


def test_the_decay_of_repeated_tokens_is_read_from_a_simulated_table_and_only_where_there_are_any():
    truth, rng = Muennighoff(data_decay=6.0), np.random.default_rng(2)
    table = {"parameters": 10 ** rng.uniform(7, 9.5, 60), "unique": 10 ** rng.uniform(8, 10, 60)}
    table["tokens"] = table["unique"] * rng.uniform(1, 30, 60)
    loss = truth.predict(table) * np.exp(0.002 * rng.standard_normal(60))
    fitted = Muennighoff().fit({**table, "loss": loss}, rng, resamples=30)
    low, high = fitted.interval("data_decay", 0.98)
    assert low < 6.0 < high < 10.0
    once = {**table, "tokens": table["unique"]}
    assert "data_decay" not in Muennighoff().free(once)


def direct(law, n, b, k):
    """Float64 recursion of each direction's mean square, step by step: no closed form."""
    i = np.arange(1, n + 1)
    curvature = law.curvature * i**-law.q
    square = law.distance * i**-law.p / curvature  # E (w − w*)²
    for _ in range(k):
        square = (1 - LEARNING_RATE * curvature) ** 2 * square + LEARNING_RATE**2 * law.noise * i**-law.r / b
    rest = 0.5 * law.distance * zeta(law.p, n + 1)
    return math.exp(law.log_e) + rest + 0.5 * float((curvature * square).sum())


@pytest.mark.parametrize(("n", "b", "k"), [(1, 1, 1), (30, 2, 7), (100, 8, 50), (5000, 4, 200), (200_000, 64, 20)])
def test_the_noisy_quadratic_is_what_noisy_descent_on_a_quadratic_reaches(n, b, k):
    law = NoisyQuadratic()
    told = law.predict({"parameters": [n], "batch": [b], "steps": [k]})[0]
    assert told == pytest.approx(direct(law, n, b, k), rel=1e-6)


@pytest.mark.parametrize(("n", "b", "k"), [(12, 4, 30), (6, 1, 3), (12, 16, 5)])
def test_stochastic_descent_on_the_quadratic_ends_at_the_loss_that_the_law_says(n, b, k):
    """2,000 runs of SGD: w ← w − η (λ w + the mean of B draws of noise of variance R i^−r), from w² = P i^−p / λ."""
    law, rng, runs = NoisyQuadratic(), np.random.default_rng(n + b + k), 2000
    i = np.arange(1, n + 1)
    curvature, spread = law.curvature * i**-law.q, np.sqrt(law.noise * i**-law.r)
    w = rng.choice([-1.0, 1.0], (runs, n)) * np.sqrt(law.distance * i**-law.p / curvature)
    for _ in range(k):
        w -= LEARNING_RATE * (curvature * w + (spread * rng.standard_normal((b, runs, n))).mean(axis=0))
    loss = 0.5 * (curvature * w**2).sum(axis=1)
    rest = math.exp(law.log_e) + 0.5 * law.distance * (zeta(law.p) - sum(j**-law.p for j in range(1, n + 1)))
    error = loss.std() / runs**0.5
    told = law.predict({"parameters": [n], "batch": [b], "steps": [k]})[0] - rest
    assert abs(told - loss.mean()) < 3.5 * error
    assert error < 0.05 * told


@pytest.mark.parametrize("flops", [600.0, 1e6, 1e12])
def test_no_split_among_many_beats_the_best_of_the_noisy_quadratic(flops):
    law = NoisyQuadratic()
    parameters, batch, steps = law.optimal(flops)
    assert 6 * parameters * batch * steps == pytest.approx(flops)
    assert min(parameters, batch, steps) >= 1 - 1e-9
    told = law.predict({"parameters": [parameters], "batch": [batch], "steps": [steps]})[0]
    whole = math.log(flops / 6)
    n, b = (axis.ravel() for axis in np.meshgrid(*[np.linspace(0, whole, 250)] * 2))
    n, b = n[n + b <= whole], b[n + b <= whole]
    every = {"parameters": np.exp(n), "batch": np.exp(b), "steps": np.exp(whole - n - b)}
    assert law.predict(every).min() * 0.995 < told <= law.predict(every).min() + 1e-12
    fixed = law.optimal(flops, parameters=20.0)
    along = np.linspace(0, whole - math.log(20), 4001)
    only = {"parameters": np.full(4001, 20.0), "batch": np.exp(along), "steps": np.exp(whole - math.log(20) - along)}
    seen = law.predict({name: [value] for name, value in zip(law.splits, fixed, strict=True)})[0]
    assert fixed[0] == pytest.approx(20)
    assert seen == pytest.approx(law.predict(only).min(), rel=1e-5)


def test_too_few_flops_for_a_step_are_refused():
    with pytest.raises(InputError, match="one step"):
        NoisyQuadratic().optimal(5.0)
    with pytest.raises(TypeError, match="tokens"):
        NoisyQuadratic().optimal(1e9, tokens=3.0)


def test_every_law_says_how_to_split_flops():
    for name in names(LossModel):
        law = resolve(LossModel, {"method": name}, "law")
        given = {"unique": 1e9} if "unique" in law.reads else {}
        assert len(law.optimal(1e18, **given)) == len(law.splits)


@given(st.floats(1.01, 4), st.integers(1, 10**6))
def test_the_tail_of_the_distances_is_hurwitz_zeta(p, start):
    assert _tail(np.asarray(p), np.array([float(start)]))[0] == pytest.approx(zeta(p, start), rel=1e-8)


def test_a_simulated_table_of_the_noisy_quadratic_is_predicted_at_batches_it_did_not_hold():
    truth, rng = NoisyQuadratic(), np.random.default_rng(4)
    sizes = np.round(10 ** rng.uniform(1, 4, (3, 20)))
    table = dict(zip(("parameters", "batch", "steps"), sizes, strict=True))
    start = NoisyQuadratic(log_e=-0.7, p=1.2, q=0.5, r=2.0, distance=2.5, curvature=0.7, noise=5.0)
    fitted = start.fit({**table, "loss": truth.predict(table)}, rng, resamples=1)
    ahead = {"parameters": [30_000], "batch": [100_000], "steps": [20_000]}
    assert fitted.law.predict(ahead)[0] == pytest.approx(truth.predict(ahead)[0], rel=0.01)
