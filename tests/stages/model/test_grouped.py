"""n-bit numbers in n bits, and grouped layers against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stages.model.bits import pack_bits, packed_bytes, unpack_bits
from stages.model.grouped import GroupedLinear


def layer(outputs=12, inputs=20, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=True).requires_grad_(False)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_n_bits_take_n_bits_and_come_back(bits):
    codes = torch.arange(1000, dtype=torch.int32).mul(37).remainder(2**bits).to(torch.uint8)
    held = pack_bits(codes, bits)
    assert held.nbytes == packed_bytes(1000, bits) == 1000 * bits / 8
    assert torch.equal(unpack_bits(held, bits, 1000), codes)
    assert torch.equal(unpack_bits(pack_bits(codes[:13], bits), bits, 13), codes[:13])


@pytest.mark.parametrize(("bits", "group"), [(2, 5), (3, 8), (4, None)])
def test_a_weight_is_the_nearest_of_its_groups_numbers_with_zero_among_them(bits, group):
    plain = layer()
    plain.weight[3] = plain.weight[3].abs() + 1  # on one side of 0
    held = GroupedLinear(plain, bits, group)
    found, each = held.weight_as(torch.float64), group or 20
    for row, expected in zip(found, plain.weight.double(), strict=True):
        for start in range(0, 20, each):
            part = expected[start : start + each]
            low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
            if start + each > 20:
                low, high = min(low, 0.0), max(high, 0.0)
            step = (high - low) / (2**bits - 1)
            zero = round(-low / step)
            level = (part / step).round().add(zero).clamp(0, 2**bits - 1) - zero
            torch.testing.assert_close(row[start : start + each], level * step, rtol=1e-5, atol=1e-6)
    groups = 12 * -(-20 // each)
    assert held.codes.nbytes == packed_bytes(groups * each, bits)
    assert held.scales.nbytes + held.zeros.nbytes == groups * 5
    x = torch.randn(2, 3, 20)
    torch.testing.assert_close(held(x), x @ found.float().T + plain.bias)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_stochastic_rounding_keeps_the_mean_and_never_leaves_the_two_neighbours(bits):
    plain, source = layer(6, 16), torch.Generator().manual_seed(3)
    held = GroupedLinear(plain, bits, 8, symmetric=True)
    assert held.zeros is None
    steps = 2 ** (bits - 1) - 1
    scale = plain.weight.view(6, 2, 8).abs().amax(-1) / steps
    total, draws = torch.zeros(6, 16, dtype=torch.float64), 2000
    for _ in range(draws):
        held.hold(plain.weight, source)
        found = held.weight_as(torch.float64)
        total += found
        assert ((found - plain.weight).view(6, 2, 8).abs() <= scale[..., None] * (1 + 1e-5)).all()
    away = (total / draws - plain.weight).view(6, 2, 8).abs() / scale[..., None]
    assert away.max() < 5 * 0.5 / draws**0.5  # five standard errors of a coin


def test_a_plain_layers_state_is_what_is_held():
    plain = layer()
    held = GroupedLinear(plain, 3, 8)
    state = held.state_dict()
    assert set(state) == {"weight", "bias"}
    again = held.plain()
    assert torch.equal(again.weight, state["weight"])
    assert torch.equal(again(torch.ones(1, 20)), held(torch.ones(1, 20)))
