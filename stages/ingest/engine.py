"""One split from its files to sorted, unique, tokenised rows; then its tables. Reads once, in one pass, in input order.

A row is read, brought to normal form, compared with what was seen, tokenised, and spilled to sorted runs; the runs are
merged into the tables by `tables.py`. Held in memory: a block of rows (`BLOCK_BYTES`), one run, and the caches of two
indexes on disk. Nothing that grows with the pool is: measured in `tests/stages/ingest/test_scale.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.config import IngestConfig
from data_contracts.errors import InputError
from stages.ingest.candidate import Broken, Candidate, normal_form
from stages.ingest.compressed import bare_stem
from stages.ingest.formats import Formats
from stages.ingest.readers import read_records
from stages.ingest.report import Report, clean, place
from stages.ingest.seen import Seen, duplicate, keys_of, leak
from stages.ingest.sources import files_of
from stages.ingest.spill import Row, SortedSpill
from stages.ingest.tables import SPILLED
from stages.model.tokenise import Renderer, truncate
from stages.stage import Progress, Work
from stages.text.near_duplicates import NearIndex
from stages.text.normalise import example_id
from stages.text.refusal import Refused

BLOCK_ROWS = 256
BLOCK_BYTES = 4 << 20
NEAR_SPLITS = ("target", "pool")
"""Splits whose near-duplicates are removed; of a validation, holdout or retention only equal rows are."""


class Ingest:
    """The state that the splits of one run share: what was seen, and what is reported.

    Args:
        settings: how rows are read.
        work: scratch, progress, quarantine and outputs.
        root: the folder that relative names start from.
        renderer: makes the renderer when the first row needs it; None: no tokens are made.
        longest: most tokens a row.
    """

    def __init__(
        self,
        settings: IngestConfig,
        work: Work,
        root: Path,
        renderer: Callable[[], Renderer] | None,
        longest: Callable[[], int] | None = None,
    ) -> None:
        self.settings, self.work, self.root = settings, work, root
        self.formats = Formats(settings)
        self.report = Report(work.quarantine)
        self._make_renderer, self._longest = renderer, longest
        self._seen = Seen(work.folder / "seen.sqlite")
        self._near = (
            NearIndex(work.folder / "near.sqlite", settings.near_threshold) if settings.dedupe == "near" else None
        )
        self._splits: list[str] = []

    @cached_property
    def renderer(self) -> Renderer | None:
        """The renderer, made when first needed."""
        return self._make_renderer() if self._make_renderer is not None else None

    @cached_property
    def limit(self) -> int:
        """Most tokens a row: the configured number, or what the model was made for."""
        return min(self.settings.longest_tokens, self._longest()) if self._longest else self.settings.longest_tokens

    def split(self, split: str, names: Iterable[str]) -> tuple[SortedSpill, Counter[bytes]]:
        """Read one split; return its rows and how many there are of each unit (task or question; of a target only).

        Raises `InputError` where a file is missing or no row is usable, with the first reasons.
        """
        spill = SortedSpill(self.work.folder / f"runs-{split}", SPILLED)
        units: Counter[bytes] = Counter()
        folded = 0
        sources = files_of(list(names), self.root)
        with self.work.progress(f"ingest {split}", sum(s.path.stat().st_size for s in sources) or 1, "B") as bar:
            for block in self._blocks(split, sources, bar):
                usable = [item.near for item in block if isinstance(item, Candidate)]
                bands = iter(self._near.hashes(usable) if self._near else [None] * len(usable))
                for item in block:
                    if isinstance(item, Broken):
                        self.report.refuse(split, item.record, item.fault, item.row_id)
                        continue
                    before = self.renderer.folded if self.renderer else 0
                    try:
                        row = self._row(split, item, next(bands))
                    except Refused as fault:
                        self.report.refuse(split, item.record, fault, item.example.row_id, item.example_id)
                        continue
                    folded += self.renderer.folded - before if self.renderer else 0
                    spill.add(row)
                    if split == "target":
                        units[row[-1]] += 1
                    self.report.keep(split, item.record, item.example.row_id, item.example.mended)
        self._splits.append(split)
        total = self.report.totals(split)
        if not total.kept:
            first = "; ".join(self.report.first.get(split, ["the files hold no record"]))
            raise InputError(
                f"`{split}` holds at least one usable row",
                f"no usable row: 0 of {total.read} in {split}. {first}",
                "mend the rows named, or map their fields with ingest.fields and ingest.roles",
            )
        if folded:
            self.work.notice(f"system role folded: {folded} of {total.kept} rows of {split}")
        return spill, units

    def _blocks(self, split: str, sources: Iterable[Any], bar: Progress) -> Iterator[list[Candidate | Broken]]:
        block: list[Candidate | Broken] = []
        size = 0
        for source in sources:
            limit = self.settings.longest_row_bytes
            for record in read_records(source.path, clean(source.label), limit, bar.advance, self.work.folder):
                self.report.file(split, record.file).read += 1
                item = normal_form(record, self.formats)
                block.append(item)
                size += len(item.messages) + len(item.example.text) if isinstance(item, Candidate) else 0
                if len(block) >= BLOCK_ROWS or size >= BLOCK_BYTES:
                    yield block
                    block, size = [], 0
        if block:
            yield block

    def _row(self, split: str, item: Candidate, bands: list[int] | None) -> Row:
        """Check a row against what was seen, tokenise it, note it. Raises `Refused`."""
        key, where = b"E" + bytes.fromhex(item.example_id), place(item.record, item.example.row_id)
        content, question = (
            keys_of(item.near.question, item.near.answer) if self._splits or split != "pool" else (b"", None)
        )
        self._check_leak(split, item, content, question)
        found = self._seen.find(key)
        if found is not None:
            if found[0] != split:
                raise leak("the same content as", *found)
            if self.settings.dedupe != "none":
                raise duplicate(found[1])
            copy = self._seen.copies(key)
            item.example_id = example_id(item.example.messages, item.example.tools, item.example.text, copy)
        near = self._near.find(item.near, bands) if self._near and bands is not None and split in NEAR_SPLITS else None
        if near is not None:
            of, _, place_of = near[0].partition("\n")
            raise duplicate(place_of, near[1]) if of == split else leak(f"{near[1]:.3f} alike to", of, place_of)
        ids, mask, truncated = self._tokens(item)
        if found is None:
            self._note(split, item, where, key, content, question)
        if self._near and bands is not None:
            self._near.add(item.near, bands, f"{split}\n{where}")
        unit = b"T" + item.example.task.encode("utf-8", "replace") if self.settings.task_field else question or content
        example, record = item.example, item.record
        return (
            item.example_id,
            clean(example.source) or clean(bare_stem(record.file)),
            record.file,
            record.row,
            item.messages,
            item.tools,
            example.text,
            json.dumps(example.extra) if example.extra else "{}",
            ids,
            mask,
            truncated,
            unit,
        )

    def _check_leak(self, split: str, item: Candidate, content: bytes, question: bytes | None) -> None:
        if not self._splits:
            return
        task = item.example.task
        for what, key in (
            (f"the task {task!r}", b"T" + task.encode("utf-8", "replace") if task else None),
            ("the same content as", content),
            ("the same question as", question),
        ):
            found = self._seen.find(key) if key is not None else None
            if found is not None and found[0] != split:
                raise leak(what, *found)

    def _note(
        self, split: str, item: Candidate, where: str, key: bytes, content: bytes, question: bytes | None
    ) -> None:
        self._seen.add(key, split, where)
        if split != "pool":
            self._seen.add(content, split, where)
            if question is not None:
                self._seen.add(question, split, where)
            if item.example.task:
                self._seen.add(b"T" + item.example.task.encode("utf-8", "replace"), split, where)
        if item.example.row_id and not self._seen.add(
            b"R" + split.encode() + item.example.row_id.encode("utf-8", "replace"), split, where
        ):
            self.report.repeated_ids += 1

    def _tokens(self, item: Candidate) -> tuple[bytes, bytes, bool]:
        """Return (ids, mask, whether cut) as bytes; empty where no tokens are made. Raises `Refused`."""
        if self.renderer is None:
            return b"", b"", False
        example = item.example
        if example.messages:
            rendered = self.renderer.render(example.messages, example.tools)
        else:
            rendered = self.renderer.render_text(example.text, example.answer_start)
        ids, mask, cut = truncate(rendered, self.limit, self.settings.truncation)
        return np.array(ids, np.int32).tobytes(), np.array(mask, np.bool_).tobytes(), cut

    def close(self) -> None:
        """Let go of the indexes on disk and delete them."""
        self._seen.close()
        if self._near:
            self._near.close()
        for name in ("seen.sqlite", "near.sqlite"):
            (self.work.folder / name).unlink(missing_ok=True)
