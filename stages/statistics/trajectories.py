"""Losses met in training, by example: each visit's mean loss in the order of the visits.

Read from the `example_losses` tables that training leaves, one batch at a time. Held: 44 bytes a visit. What training
did not visit has no trajectory; what that means is for each method to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_contracts.arrow import TABLE_FILE, read_batches


class Trajectories:
    """The visits of every example that training met.

    Args:
        folders: of `example_losses` artifacts of one run; their steps count from the run's start.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        ids, steps, losses = [np.zeros(0, "S32")], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for folder in folders:
            for batch in read_batches(folder / TABLE_FILE):
                ids.append(np.array(batch.column("example_id").to_pylist(), dtype=np.bytes_))
                steps.append(batch.column("step").to_numpy())
                losses.append(batch.column("loss_sum").to_numpy() / batch.column("answer_tokens").to_numpy())
        name_V, step_V = np.concatenate(ids), np.concatenate(steps)
        order = np.lexsort((step_V, name_V))  # stable: visits of one step stay in the order of their positions
        self._loss_V = np.concatenate(losses)[order]
        self._names, self._starts = np.unique(name_V[order], return_index=True)
        self._ends = np.append(self._starts[1:], len(name_V))

    def of(self, example_id: str) -> np.ndarray:
        """Return the mean losses (nats a token) at the example's visits, oldest first; empty where there are none."""
        name = example_id.encode()
        at = int(np.searchsorted(self._names, np.bytes_(name)))
        if at == len(self._names) or bytes(self._names[at]) != name:
            return np.zeros(0, dtype=np.float32)
        return np.asarray(self._loss_V[self._starts[at] : self._ends[at]])
