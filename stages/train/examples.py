"""The selected examples as training reads them: a table of tokens stays on disk, only places and lengths are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.arrow import read_table
from data_contracts.config import TrainConfig
from data_contracts.errors import InputError
from data_contracts.records import Plan
from stages.model.batch import Row, TokenBatch, TokenTable, collate
from stages.model.packing import collate_packed
from stages.train.order import MicroBatch, Visits, visits_of


class Examples:
    """The rows of a selection in its training order.

    Args:
        selection: the `selection` table's file.
        tokens: `tokens` tables' files; together they hold every selected example.

    Attributes:
        lengths: tokens a row, int32, shape (rows,).
        answers: answer tokens a row that are predicted (a row's first token never is), int32, shape (rows,).
        repeats: visits an epoch, int32, shape (rows,).
        phases: the phase of an epoch that a row belongs to, int32, shape (rows,).
        weights: factor on a row's loss, float32, shape (rows,).
        sources: the part of the mixture that a row stands for, int64, shape (rows,).
        shares: of the visits of an epoch that each part has, float64, shape (parts,).

    Raises `InputError` for a selected example that no table holds.
    """

    def __init__(self, selection: Path, tokens: Sequence[Path]) -> None:
        table = read_table(selection).sort_by([("order", "ascending"), ("rank", "ascending")])
        self._tables = [TokenTable(path) for path in tokens]
        self.weights: np.ndarray = table.column("weight").to_numpy()
        self.repeats: np.ndarray = table.column("repeats").to_numpy()
        self.sources: np.ndarray = np.unique(table.column("mixture").to_numpy(), return_inverse=True)[1]
        self.shares: np.ndarray = np.bincount(self.sources, self.repeats) / self.repeats.sum()
        self.phases: np.ndarray = table.column("order").to_numpy()
        places = [self._find(example_id) for example_id in table.column("example_id").to_pylist()]
        self._table_of = np.array([place[0] for place in places], np.int16)
        self._row_of = np.array([place[1] for place in places], np.int32)
        self.lengths: np.ndarray = np.array([self._tables[t].lengths[row] for t, row in places], np.int32)
        predicted = [predicted_tokens(read_table(path)) for path in tokens]
        self.answers: np.ndarray = np.array([predicted[t][row] for t, row in places], np.int32)

    def __len__(self) -> int:
        return len(self.repeats)

    def _find(self, example_id: str) -> tuple[int, int]:
        missing: InputError | None = None
        for number, table in enumerate(self._tables):
            try:
                return number, table.index_of(example_id)
            except InputError as error:
                missing = error
        raise InputError(
            "every selected example has tokens among those given to train",
            f"{example_id} has none",
            "pass the tokens that the selection was made from (target_tokens too where it takes target rows)",
        ) from missing

    def visits(self, plan: Plan, train: TrainConfig, seed: int, start: int = 0) -> Visits:
        """Return the stream in which a segment visits them, behind the `start` visits of those before it."""
        return visits_of(self.repeats, plan, train, seed, self.phases, start)

    def row(self, index: int) -> Row:
        """Return row `index` with its weight."""
        return self._tables[self._table_of[index]].row(int(self._row_of[index]), float(self.weights[index]))

    def batch(
        self, window: np.ndarray, micro: MicroBatch, packed: bool, factors: np.ndarray | None = None
    ) -> TokenBatch:
        """Return one micro-batch of a window of row indices; `factors`, one a place, multiply the rows' weights."""
        rows = [[self.row(int(window[place])) for place in group] for group in micro.rows]
        if factors is not None:
            factor = iter(factors[micro.places].tolist())
            rows = [[replace(row, weight=row.weight * next(factor)) for row in some] for some in rows]
        return collate_packed(rows) if packed else collate([row for group in rows for row in group])


def predicted_tokens(tokens: pa.Table) -> np.ndarray:
    """Return how many answer tokens of each row of a `tokens` table are predicted: all but one in the first place."""
    first = pc.list_element(tokens.column("answer_mask"), 0).to_numpy().astype(np.int32)
    counts: np.ndarray = tokens.column("n_answer_tokens").to_numpy() - first
    return counts
