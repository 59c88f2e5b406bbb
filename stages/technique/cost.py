"""What a micro-batch costs in the way that a plan trains: the operations that the savings add are counted too."""

from __future__ import annotations

from data_contracts.records import Plan
from stages.meter.flops import FlopModel


def micro_batch_flops(meter: FlopModel, plan: Plan, rows: int, tokens: int, answers: int) -> int:
    """Return the operations of one micro-batch of a step, forward and backward.

    Args:
        meter: traced with the plan's technique and recomputed blocks.
        plan: chunks of the head (each goes through it again in the backward pass) and updates inside the backward pass
            (every pass is made twice) count.
        rows, tokens: shape of the batch.
        answers: supervised tokens in it.
    """
    chunked = plan.loss_chunks > 1 and answers > 1
    return meter.train(rows, tokens, answers, chunked=chunked) * (2 if plan.update_in_backward else 1)
