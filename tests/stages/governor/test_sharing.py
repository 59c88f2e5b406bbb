"""Sharing a pot against the specification's numbers, brute force on a grid, and curves of a known law."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data_contracts.errors import InputError
from stages.governor.allocation import share
from stages.governor.sharing import Claim, Curve, curve_of, divide
from stages.governor.state import State

A, B, POT = [2.0, 1.0, 3.0], [0.3, 0.5, 0.2], 1e4


def claim(name: str, a: Any, b: Any, floor: float = 1.0, **more: Any) -> Claim:
    a_B, b_B = np.broadcast_arrays(np.atleast_1d(a).astype(float), np.atleast_1d(b).astype(float))
    return Claim(name, curve=Curve(np.full(len(a_B), floor), a_B, b_B), **more)


def claims(**more: Any) -> list[Claim]:
    return [claim(f"run{i}", a, b, **more) for i, (a, b) in enumerate(zip(A, B, strict=True))]


def test_three_runs_get_what_the_specification_works_out_at_one_marginal_gain() -> None:
    found = divide(claims(), POT)
    assert [portion.part for portion in found] == pytest.approx([3071.1, 932.3, 5996.6], abs=0.05)
    by_hand = [a * b * portion.part ** -(b + 1) for a, b, portion in zip(A, B, found, strict=True)]
    assert [portion.gain for portion in found] == pytest.approx(by_hand, rel=1e-9)
    assert by_hand == pytest.approx([by_hand[0]] * 3, rel=1e-9)
    assert [portion.loss.expected for portion in found if portion.loss] == pytest.approx(
        [1 + a * portion.part**-b for a, b, portion in zip(A, B, found, strict=True)]
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_point_of_a_grid_has_a_lower_expected_sum_of_weighted_losses(seed: int) -> None:
    """Hours at each run's own rate, reserves, what was spent, caps, weights, and laws of 20 draws."""
    rng = np.random.default_rng(seed)
    asked = [
        claim(
            f"run{i}",
            rng.uniform(0.5, 3, 20),
            rng.uniform(0.1, 0.6, 20),
            trained=float(rng.uniform(100, 3000)),
            rate=float(rng.uniform(0.5, 2)),
            kept=float(rng.uniform(0, 500)) if seed % 2 else 0.0,
            reserve=0.05,
            weight=float(rng.uniform(0.5, 2)),
            most=float(rng.choice([math.inf, 2500.0])),
        )
        for i in range(3)
    ]
    found = divide(asked, POT)

    def total(parts: tuple[float, ...]) -> float:
        worth = 0.0
        for one, part in zip(asked, parts, strict=True):
            # what may be spent in all less the reserve of it, less what was spent, at its rate
            train = max(0.0, ((1 - one.reserve) * (one.kept + part) - one.kept) / one.rate)
            assert one.curve is not None
            worth += one.weight * float((one.curve.a_B * (one.trained + train) ** -one.curve.b_B).mean())
        return worth

    ours = total(tuple(portion.part for portion in found))
    step = POT / 100
    spent = sum(portion.part for portion in found)
    assert spent == pytest.approx(min(POT, sum(one.most for one in asked)))
    for i, j in itertools.product(range(101), repeat=2):
        parts = (i * step, j * step, POT - (i + j) * step)
        if min(parts) >= 0 and all(part <= one.most for part, one in zip(parts, asked, strict=True)):
            assert ours <= total(parts) + 1e-12


def test_draws_that_are_all_the_same_are_one_law_and_flat_ones_only_thin_the_gain() -> None:
    one = share(A, B, POT, spent_R=[5, 500, 5])
    many = share([np.full(7, a) for a in A], [np.full(7, b) for b in B], POT, spent_R=[5, 500, 5])
    np.testing.assert_allclose(many.flops_R, one.flops_R, rtol=1e-9)
    half = share([np.array([2.0, 0.0]), 1.0], [np.array([0.3, 0.3]), 0.5], POT)
    np.testing.assert_allclose(half.flops_R, share([1.0, 1.0], [0.3, 0.5], POT).flops_R, rtol=1e-9)
    with pytest.raises(InputError, match="above 0"):
        share([np.zeros(3)], [np.ones(3)], POT)


def test_who_is_unknown_gets_an_equal_part_who_does_not_fall_or_may_not_gets_nothing() -> None:
    known = claims()
    others = [Claim("new", why="nothing was run yet"), claim("flat", 0.0, 0.3), replace(known[0], name="no", most=0.0)]
    found = {portion.name: portion for portion in divide([*known, *others], POT)}
    assert found["new"].part == pytest.approx(POT / 6)
    assert (found["new"].loss, found["new"].gain) == (None, None)
    assert found["flat"].part == found["no"].part == 0
    assert (found["flat"].why, found["no"].why) == ("its curve is flat", "it may get nothing")
    rest = share(A, B, POT - POT / 6).flops_R
    assert [found[one.name].part for one in known] == pytest.approx(rest.tolist(), rel=1e-9)


def test_a_weight_is_a_factor_of_the_loss_and_a_cap_leaves_the_rest_to_others() -> None:
    twice = divide([replace(one, weight=2.0 if one.name == "run1" else 1.0) for one in claims()], POT)
    np.testing.assert_allclose([one.part for one in twice], share([2, 2, 3], B, POT).flops_R, rtol=1e-9)
    capped = divide([replace(one, most=1000.0) for one in claims()], POT)
    assert [one.part for one in capped] == [1000.0] * 3
    assert {one.why for one in capped} == {"the most it may get"}


def test_a_run_whose_part_would_not_pay_its_evaluation_gets_nothing_and_says_so() -> None:
    far = claim("far", 2.0, 0.3, trained=1e6, kept=1e6, reserve=0.05)
    found = divide([*claims(), far], POT)
    assert found[3].part == 0
    assert found[3].why == "others gain more by all of it"
    assert sum(one.part for one in found) == pytest.approx(POT)
    assert divide([far], 0.9 * far.fee)[0].part == 0


def test_curves_of_known_laws_are_recovered_and_shared_as_the_laws_say() -> None:
    asked = []
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        rows = [{"step": s, "flops": 40 * s, "validation_loss": 1 + a * (40 * s) ** -b} for s in range(1, 25)]
        curve, why, rises = curve_of(State.from_rows([rows]))
        assert curve is not None
        assert (why, rises) == ("", False)
        asked.append(Claim(f"run{i}", trained=960.0, curve=curve))
    found = divide(asked, POT)
    expected = share(A, B, POT, spent_R=[960.0] * 3).flops_R
    assert [one.part for one in found] == pytest.approx(expected.tolist(), rel=0.03)
    for a, b, one in zip(A, B, found, strict=True):
        assert one.loss is not None
        assert one.loss.expected == pytest.approx(1 + a * (960 + one.part) ** -b, abs=2e-3)


def test_a_short_a_rising_and_a_maximised_curve_are_not_continued_and_it_is_said_why() -> None:
    def rows(values: list[float]) -> list[dict[str, float]]:
        return [
            {"step": i, "flops": 100 * i, "validation_loss": value, "validation_se": 0.01}
            for i, value in enumerate(values, start=1)
        ]

    curve, why, rises = curve_of(State.from_rows([rows([3, 2.5, 2.2])]))
    assert curve is None
    assert (why, rises) == ("3 evaluation(s) are too few to continue its curve", False)
    curve, why, rises = curve_of(State.from_rows([rows([3, 2.5, 2.2, 2.0, 2.3, 2.6, 3.0])]))
    assert curve is None
    assert rises
    assert "1 nats above its best" in why
    curve, why, _ = curve_of(State.from_rows([rows([0.1] * 9)], direction="maximise"))
    assert (curve, why) == (None, "its metric is no loss")


def test_what_cannot_be_shared_is_refused() -> None:
    for asked, pot in (([], 1.0), (claims(), 0.0), ([*claims(), claims()[0]], 1.0), ([Claim("x", weight=0.0)], 1.0)):
        with pytest.raises(InputError):
            divide(asked, pot)
