"""A row on its way through the checks: its normal form and its id, or why it has none."""

from __future__ import annotations

import json
from dataclasses import dataclass

from stages.ingest.example import Example
from stages.ingest.formats import Formats
from stages.ingest.records import Record
from stages.text.near_duplicates import NearText
from stages.text.normalise import example_id
from stages.text.refusal import Refused

_TEXT_JSON = json.JSONEncoder(ensure_ascii=False)


@dataclass
class Candidate:
    """A row in normal form on its way through the checks."""

    record: Record
    example: Example
    messages: str
    tools: str
    example_id: str
    near: NearText


@dataclass
class Broken:
    """A row that has no normal form, waiting for its turn in the quarantine."""

    record: Record
    fault: Refused
    row_id: str


def normal_form(record: Record, formats: Formats) -> Candidate | Broken:
    """Return the row in normal form, or why it has none."""
    row_id = ""
    try:
        if record.fault is not None or record.value is None:
            raise record.fault or Refused("empty_row", "the record is empty", "")
        row_id = formats.row_id(record.value)
        example = formats.read(record.value)
        messages = _TEXT_JSON.encode(example.messages) if example.messages else ""
        tools = _TEXT_JSON.encode(example.tools) if example.tools else ""
        key = example_id(example.messages, example.tools, example.text)
        near = NearText.of(example.question(), example.answer())
        return Candidate(record, example, messages, tools, key, near)
    except Refused as fault:
        return Broken(record, fault, row_id)
    except RecursionError:
        return Broken(record, Refused("too_deep", "the record nests too deeply", ""), row_id)
    except UnicodeEncodeError:
        half = Refused("bad_text", "the text holds half of a surrogate pair, which is no character", "")
        return Broken(record, half, row_id)
