"""A driver to be killed: python -m tests.stages.score.killed FOLDER INPUTS scores with two slow workers in FOLDER.

INPUTS is JSON, a folder by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data_contracts.config import ScoreConfig
from data_contracts.method import resolve
from data_contracts.records import Ref
from stages.score import engine
from stages.score.scorer import Scorer
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for
from tests.stages.score.mortal import Mortal


def main(folder: str, inputs: str) -> None:
    """Score in `folder`."""
    slow = Mortal(pause=0.3)
    engine.resolve = lambda kind, *rest: slow if kind is Scorer else resolve(kind, *rest)
    ref = Ref(contract="x/1", run="", path="", digest="")
    given = {name: (Artifact(ref, Path(place)),) for name, place in json.loads(inputs).items()}
    config = ScoreConfig(batch_tokens=10, workers=2)
    STAGE.run(ScoreSlice(seed=0, score=config), Inputs(given), work_for(STAGE, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
