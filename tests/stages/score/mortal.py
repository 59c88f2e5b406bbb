"""Influence on a worker that dies: `Mortal` kills its own process, by SIGKILL, in the middle of a shard."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from stages.score.methods.influence import Influence
from stages.score.scorer import Block


class Mortal(Influence):
    """Influence, but that meeting `victim` is death, as often as `deaths`; files in `place` count. `pause`: s a block."""

    place: str = ""
    victim: str = ""
    deaths: int = 0
    pause: float = 0.0

    @classmethod
    def name(cls) -> str:
        """Return the name of what it is otherwise."""
        return "influence"

    def score(self, block: Block, state: Any) -> np.ndarray:
        """Die, or score."""
        time.sleep(self.pause)
        if self.victim in block.example_ids:
            died = len(list(Path(self.place).glob("died-*")))
            if died < self.deaths:
                (Path(self.place) / f"died-{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return super().score(block, state)
