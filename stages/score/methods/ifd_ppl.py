"""IFD by perplexities: perplexity of the answer given its prompt, over its perplexity alone.

exp(s(A|Q) − s(A)) with s the mean loss of an answer token, where Cherry LLM divides the losses (`ifd_loss`): the two
rank differently. Source: Li et al. 2024 ("Superfiltering"), whose scorer is a small model, as any base here can be.
What is compared is said in `stages/score/ifd.py`.
"""

from __future__ import annotations

from stages.score.ifd import InstructionFollowing


class IfdPpl(InstructionFollowing):
    """exp(s(A|Q) − s(A)), s the mean cross-entropy of an answer token in nats."""

    of_perplexities = True
