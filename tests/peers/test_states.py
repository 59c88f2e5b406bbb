"""AdamW in 4 bits against torchao's own, run without its compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stages.technique.states_4bit import AdamW4bit

optim: Any = pytest.importorskip("torchao.optim", reason="torchao is absent: pip install .[peers]")


def test_a_step_in_4_bits_is_torchaos() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.randn(50, 60))]
    theirs = [nn.Parameter(item.detach().clone()) for item in ours]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    one, other = AdamW4bit(ours, **settings), optim.AdamW4bit(theirs, **settings)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(6):
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            one.step()
            other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        found, expected = one.state[ours[0]], other.state[theirs[0]][name]
        assert torch.equal(found[name], expected.codes)
        torch.testing.assert_close(found[f"{name}_scale"], expected.scale)
