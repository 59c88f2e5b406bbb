"""Full fine-tuning: every parameter trains.

The most capable and the most memory: weight, gradient and two moments make 16 bytes a parameter in float32. A tied
embedding is one parameter and counts once.
"""

from __future__ import annotations

from typing import ClassVar, get_args

from data_contracts.config import Saving
from stages.technique.base import InPlace


class Full(InPlace):
    """Train all of the model's parameters.

    The default peak learning rate, 2e-5, is that of instruction tuning at 7B (Taori et al. 2023, Alpaca; Touvron et
    al. 2023, Llama 2, section 3.1); models of some hundred million parameters bear ten times as much.
    """

    learning_rate: ClassVar[float] = 2e-5
    savings: ClassVar[frozenset[Saving]] = frozenset(get_args(Saving))
