"""Packed layers: bytes, nearest and stochastic rounding, and packing what was packed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from stages.model.packed import NF4, PackedLinear, pack, release_packed


def layer(outputs=24, inputs=40, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=False).requires_grad_(False)


@pytest.mark.parametrize(("bits", "each"), [(8, 1.0), (4, 0.5)])
def test_a_weight_takes_its_bits_and_a_scale_for_64(bits, each):
    held = PackedLinear(layer(64, 32), bits)
    assert sum(item.nbytes for item in held.buffers()) == 64 * 32 * (each + 4 / 64)
    assert not list(held.parameters())


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_to_the_nearest_is_at_most_half_a_step_off(bits):
    plain = layer()
    error = (PackedLinear(plain, bits).weight_as(torch.float32) - plain.weight).abs().flatten().view(-1, 64)
    largest = plain.weight.abs().flatten().view(-1, 64).amax(1)
    step = 1 / 127 if bits == 8 else max(b - a for a, b in itertools.pairwise(NF4))
    assert (error.amax(1) <= 0.5 * step * largest * 1.04).all()
    assert error.max() > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_packed_packs_to_itself_whatever_is_drawn(bits):
    plain = layer()
    held = PackedLinear(plain, bits, torch.rand(24, 40))
    for draws in (None, torch.rand(24, 40), torch.full((24, 40), 1e-6), torch.full((24, 40), 0.999999)):
        again = PackedLinear(held.plain(), bits, draws)
        assert torch.equal(again.codes, held.codes)
        assert torch.equal(again.scales, held.scales)
        assert torch.equal(again.weight_as(torch.float32), held.weight_as(torch.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_keeps_the_mean_that_the_nearest_code_loses(bits):
    plain, draws, count = layer(8, 16), torch.Generator().manual_seed(1), 600
    found = torch.stack(
        [PackedLinear(plain, bits, torch.rand(8, 16, generator=draws)).weight_as(torch.float64) for _ in range(count)]
    )
    off = (found.mean(0) - plain.weight.double()).abs()
    spread = found.std(0) / count**0.5
    slack = plain.weight.abs().max() * (2e-4 if bits == 4 else 3e-4)  # the dropped bits of a scale, and what is near
    assert (off <= 4.5 * spread + slack).all()
    nearest = PackedLinear(plain, bits).weight_as(torch.float64)
    assert (nearest - plain.weight).abs().mean() > 5 * off.mean()


def test_four_bits_are_bitsandbytes_nf4():
    functional = pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is absent: pip install .[quantised]"
    ).functional
    plain = layer(64, 64)
    codes, state = functional.quantize_4bit(plain.weight.data, quant_type="nf4", compress_statistics=False)
    ours, scales = pack(plain.weight, 4)
    assert torch.equal(scales.flatten(), state.absmax)
    assert (ours.flatten() == codes.flatten()).float().mean() > 0.999  # ties and a decision point apart
    expected = functional.dequantize_4bit(codes, state)
    assert ((PackedLinear(plain, 4).weight_as(torch.float32) - expected).abs() > 1e-6).float().mean() < 0.002


@pytest.mark.parametrize("bits", [8, 4])
def test_it_computes_and_differentiates_as_the_plain_layer_of_its_weight(bits):
    held = PackedLinear(layer(), bits)
    plain, x = held.plain(), torch.randn(3, 5, 40, requires_grad=True)
    held(x).square().sum().backward()
    found, x.grad = x.grad, None
    plain(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        held(x)
    assert not saved  # neither weight nor input


def test_a_state_dict_is_that_of_a_plain_layer():
    model = nn.Sequential(layer(), nn.ReLU())
    model[0] = PackedLinear(model[0], 8)
    state, expected = model.state_dict(), model[0].weight_as(torch.float32)
    assert set(state) == {"0.weight"}
    release_packed(model)
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(state["0.weight"], expected)


def test_a_block_of_zeros_stays_zero():
    plain = layer(2, 64)
    plain.weight[0] = 0
    for bits in (8, 4):
        held = PackedLinear(plain, bits, torch.rand(2, 64)).weight_as(torch.float32)
        assert (held[0] == 0).all()
        assert held.isfinite().all()
