"""Mixtures by hand and by affinity: fixed, proportional, gst; and the grouping under it."""

from __future__ import annotations

import numpy as np
import pytest

from data_contracts.errors import ConfigError
from stages.mix.methods.fixed import Fixed
from stages.mix.methods.gst import Gst, affinity
from stages.mix.methods.proportional import Proportional
from stages.statistics.spectral import spectral_groups
from tests.stages.mix.setting import given


def test_proportional_is_the_pool_in_the_selections_unit():
    assert Proportional().mix(given()).share_P == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert Proportional().mix(given(unit="tokens")).share_P == pytest.approx([1 / 9, 2 / 9, 6 / 9])


def test_fixed_scales_the_weights_and_gives_the_unnamed_nothing():
    assert Fixed(shares={"a": 3, "c": 1}).mix(given()).share_P == pytest.approx([0.75, 0, 0.25])


@pytest.mark.parametrize(
    ("shares", "said"), [({"aa": 1}, "did you mean 'a'"), ({"a": -1, "b": 2}, "at least 0"), ({"a": 0}, "at least 0")]
)
def test_fixed_refuses_what_is_no_mixture(shares, said):
    with pytest.raises(ConfigError, match=said):
        Fixed(shares=shares).mix(given())


def blocks(rng, sizes, noise):
    """Return features of sources in blocks that share a direction, and the block of each."""
    block = np.repeat(np.arange(len(sizes)), sizes)
    feature = np.eye(16)[block] + rng.normal(0, noise, (len(block), 16))
    shuffled = rng.permutation(len(block))
    return feature[shuffled], block[shuffled]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (3, 5, 2, 4), (3, 3, 2)])
def test_spectral_groups_are_the_planted_blocks_and_their_number_is_found(sizes):
    rng = np.random.default_rng(sum(sizes))
    feature, block = blocks(rng, sizes, 0.05)
    label = spectral_groups(affinity(feature))
    same = block[:, None] == block[None]
    assert ((label[:, None] == label[None]) == same).all()
    assert label[0] == 0


def test_a_number_of_groups_that_is_asked_for_is_made():
    feature, _ = blocks(np.random.default_rng(1), (3, 3), 0.3)
    assert set(spectral_groups(affinity(feature), groups=4)) == {0, 1, 2, 3}
    assert spectral_groups(affinity(feature), groups=1).tolist() == [0] * 6
    assert spectral_groups(np.ones((2, 2))).tolist() == [0, 1]


def test_gst_introduces_the_group_nearest_the_target_first_and_keeps_the_pools_shares():
    feature = np.array([[1.0, 0.1, 0], [0, 1, 0.1], [1, 0, 0.1], [0, 1, 0], [np.nan] * 3])
    rows = np.array([10, 20, 30, 40, 5])
    found = Gst(replay=0.5).mix(
        given(
            parts=("a", "b", "c", "d", "e"),
            rows_P=rows,
            feature_PK=feature,
            score_P=np.array([0.2, 0.9, 0.1, -0.1, np.nan]),
        )
    )
    assert found.phase_P is not None
    # (0.9 · 20 − 0.1 · 40) / 60 = 0.233 above (0.2 · 10 + 0.1 · 30) / 40 = 0.125
    assert found.phase_P.tolist() == [1, 0, 1, 0, 2]
    assert found.share_P == pytest.approx(rows / rows.sum())
    assert found.replay == 0.5
    assert found.facts["parts_without_a_feature"] == 1
    assert [row[1] for row in found.tables[0].rows] == ["b, d", "a, c"]
