"""QLoRA: low-rank adapters beside a base that is held in four bits.

As LoRA, with the frozen linear layers in NF4: about 4.1 bits a weight with doubly quantised scales instead of 32. They
are dequantised layer by layer, forward and backward, so a step takes a little longer. Embeddings, norms and the head
stay as they are. What is learnt belongs to the quantised base: `merge` gives the plain model of the dequantised weights
with the adapters added, which computes what was trained; adding them to the original weights would not.
Source: Dettmers et al. 2023 (arXiv 2305.14314), section 3; rank 64 and alpha 16 are its appendix B.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import Technique
from stages.technique.methods.lora import Lora

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class Qlora(Lora):
    """Train low-rank adapters on a base in NF4; needs bitsandbytes (the extra `quantised`)."""

    packs: ClassVar[bool] = True
    savings: ClassVar[frozenset[Saving]] = Technique.savings

    r: int = Field(64, ge=1, le=4096, description="Rank of an adapter. Dettmers et al. 2023.")
    alpha: float = Field(16.0, gt=0, le=65536, description="The update is scaled by alpha / r.")
    use_dora: Literal[False] = Field(False, description="DoRA reads whole weights: not with a quantised base.")
    double_quant: bool = Field(True, description="Hold the scales of the weights' blocks in eight bits too.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return a PEFT model whose frozen linear layers, but the head, are in four bits.

        Raises `MethodError` where bitsandbytes is not installed, and as `Lora.wrap`.
        """
        from stages.model.nf4 import hold_in_nf4

        wrapped = super().wrap(model)
        hold_in_nf4(wrapped, double=self.double_quant)
        return wrapped

    def in_four_bits(self) -> None:
        """Return none: it is."""
        return
