"""What a micro-batch costs in the way that a plan trains: the operations that the savings add are counted too."""

from __future__ import annotations

from stages.meter.flops import FlopModel


def micro_batch_flops(
    meter: FlopModel, rows: int, tokens: int, answers: int, *, loss_chunks: int, update_in_backward: bool
) -> int:
    """Return the operations of one micro-batch of a step, forward and backward.

    Args:
        meter: traced with the plan's technique and recomputed blocks.
        rows, tokens: shape of the batch.
        answers: supervised tokens in it.
        loss_chunks: each part goes through the head again in the backward pass.
        update_in_backward: every pass is made twice.
    """
    chunked = loss_chunks > 1 and answers > 1
    return meter.train(rows, tokens, answers, chunked=chunked) * (2 if update_in_backward else 1)
