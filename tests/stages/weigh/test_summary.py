"""What a race says of its arms."""

from __future__ import annotations

import pytest

from data_contracts.records import WeighedArm, Weighing
from stages.weigh.engine import _summary


def arm(name: str, price: int, gain: float, reuses: float | None) -> WeighedArm:
    return WeighedArm(
        name=name, fraction=0.1, price_flops=price, spent_flops=1, probe_flops=1, probe_loss=3.0, probe_se=0.1,
        training_flops=1, expected_loss=3.0 - gain, low=2.0, high=4.0, gain=gain, gain_low=gain, gain_high=gain,
        probability=0.5, reuses=reuses,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("price", "gain", "reuses", "said"),
    [(0, 0.1, 0.0, "0 uses"), (0, -0.1, 0.0, "never"), (5, -0.1, None, "never"), (5, -0.1, 2.0, "2 uses")],
)
def test_an_arm_that_costs_nothing_and_loses_never_pays(price: int, gain: float, reuses: float, said: str) -> None:
    arms = (arm("random", 0, 0.0, 0.0), arm("other", price, gain, reuses))
    record = Weighing(chosen="random", reason="", start_loss=3.0, spendable_flops=1, arms=arms)
    assert [row[-1] for row in _summary(record).tables[0].rows] == ["–", said]
