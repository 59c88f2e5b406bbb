"""Influence on a worker that dies: `Mortal` kills its own process, by SIGKILL, in the middle of a shard.

python -m tests.stages.score.mortal FOLDER INPUTS scores with two slow workers; INPUTS is JSON, a folder by name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.config import ScoreConfig
from data_contracts.method import resolve
from data_contracts.records import Ref
from stages.score import engine
from stages.score.methods.influence import Influence
from stages.score.scorer import Block, Scorer
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for


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


def main(folder: str, inputs: str) -> None:
    """Score in `folder`."""
    from tests.stages.score import mortal  # as workers know it, not as `__main__`

    slow = mortal.Mortal(pause=0.1)
    engine.resolve = lambda kind, *rest: slow if kind is Scorer else resolve(kind, *rest)
    ref = Ref(contract="x/1", run="", path="", digest="")
    given = {name: (Artifact(ref, Path(place)),) for name, place in json.loads(inputs).items()}
    config = ScoreConfig(batch_tokens=10, workers=2)
    STAGE.run(ScoreSlice(seed=0, score=config), Inputs(given), work_for(STAGE, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
