"""Ingest: the user's files become splits of examples and tokens, and the base model is pinned.

Nothing is trained on that is also evaluated, and no row disappears: what is not used stands in the quarantine with its
file, row and reason. Light to import; the work is in `splits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from data_contracts.config import DataConfig, IngestConfig, ModelConfig
from data_contracts.cost import Frozen
from data_contracts.records import Summary
from data_contracts.tables import RETENTION, SPLITS
from stages.stage import Inputs, Stage, Takes, Work


class IngestSlice(Frozen):
    """What ingest reads of the configuration."""

    seed: int
    model: ModelConfig
    data: DataConfig
    ingest: IngestConfig


class Ingest(Stage[IngestSlice]):
    """Reads pool, target, validation and holdout; cuts the last two from the target where they are not given. What must
    not be forgotten is a split of its own where it is given."""

    verb = "ingest"
    config = IngestSlice
    takes: ClassVar[Mapping[str, Takes]] = {}
    gives: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*SPLITS, RETENTION), "examples"),
        **{f"{split}_tokens": "tokens" for split in (*SPLITS, RETENTION)},
        "quarantine": "quarantine",
        "base": "base",
    }
    optional: ClassVar[frozenset[str]] = frozenset({RETENTION, f"{RETENTION}_tokens"})

    def external(self, config: IngestSlice, root: Path) -> dict[str, Any]:
        """Return the slice with files as [label, sha256] and the model as the digest of its content."""
        from stages.ingest.sources import digests
        from stages.model.load import pin_model

        data = config.data.model_dump(mode="json")
        for split in (*SPLITS, RETENTION):
            data[split] = digests(getattr(config.data, split), root)
        if not data[RETENTION]:
            del data[RETENTION]  # a run without it is the same as before there was such a split
        pin = pin_model(config.model, root)
        model = {"source": pin.source, "digest": pin.digest, "tokenizer": pin.tokenizer_digest}
        return {
            "seed": config.seed,
            "model": model,
            "data": data,
            "ingest": config.ingest.model_dump(mode="json"),
        }

    def run(self, config: IngestSlice, inputs: Inputs, work: Work) -> Summary:
        """Read, check, tokenise, sort and write every split; see `splits.ingest`."""
        from stages.ingest.splits import ingest

        return ingest(config.data, config.model, config.ingest, work)


STAGE = Ingest()
