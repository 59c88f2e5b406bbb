"""IFD by losses: mean loss of the answer given its prompt, over its mean loss alone; the highest below 1 are best.

A ratio near 1: the prompt hardly helps, there is something to learn; above 1 it hurts, which is taken as misaligned.
Source: Li et al. 2024 ("From Quantity to Quality", Cherry LLM). Superfiltering's ratio is that of perplexities and
ranks differently: see `ifd_ppl`. What is compared is said in `stages/score/ifd.py`.
"""

from __future__ import annotations

from stages.score.ifd import InstructionFollowing


class IfdLoss(InstructionFollowing):
    """s(A|Q) / s(A), s the mean cross-entropy of an answer token in nats."""

    of_perplexities = False
