"""Rows of every format in normal form."""

from __future__ import annotations

from typing import Any

import pytest

from data_contracts.config import IngestConfig
from data_contracts.errors import ConfigError
from stages.ingest.formats import Formats
from stages.text.refusal import Refused

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CALL = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}


def read(row: dict[str, Any], **settings: Any):
    return Formats(IngestConfig(**settings)).read(row)


def refusal(row: dict[str, Any], **settings: Any) -> Refused:
    with pytest.raises(Refused) as error:
        read(row, **settings)
    return error.value


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "completion": "A"},
        {"question": "Q", "answer": "A"},
        {"input": "Q", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": " ", "response": "A"},
        {"messages": [Q, A]},
        {"messages": '[{"role": "human", "content": "Q"}, {"role": "gpt", "content": "A"}]'},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": None, "text": None, "prompt": "Q", "completion": "A"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, A]},
        {"messages": [Q, A, {"role": "user", "content": "unanswered"}]},
    ],
)
def test_each_format_gives_the_same_turns(row: dict[str, Any]) -> None:
    assert read(row).messages == [Q, A]


def test_an_alpaca_question_is_instruction_blank_line_input() -> None:
    row = {"instruction": "Do", "input": "this", "output": "A", "system": "S", "history": [["q1", "a1"]]}
    assert [m["content"] for m in read(row).messages] == ["S", "q1", "a1", "Do\n\nthis", "A"]


def test_fields_and_formats_are_mapped_by_config() -> None:
    assert read({"frage": "Q", "antwort": "A"}, fields={"prompt": "frage", "completion": "antwort"}).messages == [Q, A]
    assert read({"text": "T", "prompt": "Q", "completion": "A"}, format="text").text == "T"
    assert refusal({"messages": [Q, A]}, format="prompt").reason == "missing_field"
    with pytest.raises(ConfigError, match="'promt' is none"):
        Formats(IngestConfig(fields={"promt": "x"}))
    with pytest.raises(ConfigError, match="'robot' is none"):
        Formats(IngestConfig(roles={"narrator": "robot"}))


def test_turns_on_both_sides_of_prompt_and_completion_teach_only_the_completion() -> None:
    messages = read({"prompt": [Q, A, Q], "completion": [A]}).messages
    assert [message.get("train") for message in messages] == [None, False, None, None]


def test_tool_calls_are_brought_to_one_form_and_results_may_be_empty() -> None:
    text_arguments = {"function": {"name": "now", "arguments": '{"zone": "UTC"}'}, "id": "c1"}
    row = {
        "messages": [
            Q,
            {"role": "assistant", "content": None, "tool_calls": [text_arguments]},
            {"role": "tool", "content": None},
            A,
        ]
    }
    messages = read(row).messages
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "c1"}]}
    assert messages[2]["content"] == ""
    sharegpt = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": '{"name": "now", "arguments": {"zone": "UTC"}}'},
        {"from": "observation", "value": "09:30"},
        {"from": "gpt", "value": "A"},
    ]
    made = read({"conversations": sharegpt, "tools": '[{"name": "now"}]'})
    assert made.messages[1]["tool_calls"] == [CALL]
    assert made.messages[2] == {"role": "tool", "content": "09:30"}
    assert made.tools == [{"name": "now"}]


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "preference", "chosen"),
        ({"messages": [Q, A], "chosen": [A], "rejected": [A]}, "preference", "chosen"),
        ({"prompt": "Q", "completion": "A", "label": False}, "preference", "label"),
        ({"messages": [Q, {"role": "assistant", "content": "A", "weight": 0.5}]}, "bad_flag", "messages[1]"),
        ({"messages": [{"role": "user", "content": "Q", "train": True}, A]}, "bad_flag", "messages[0]"),
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "bad_tool_call",
            "messages[1].tool_calls[0]",
        ),
        ({"messages": [{**Q, "tool_calls": [CALL]}, A]}, "bad_tool_call", "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]}, "not_text", "messages[0].content[0]"),
        ({"messages": "[1"}, "bad_messages", "messages"),
        ({"messages": {"role": "user"}}, "bad_messages", "messages"),
        ({"messages": ["Q"]}, "bad_messages", "messages[0]"),
        ({"messages": [{"content": "Q"}, A]}, "unknown_role", "messages[0].role"),
        ({"messages": [Q, A], "tools": "nonsense"}, "bad_messages", "tools"),
        ({"messages": [Q, A], "tools": [1]}, "bad_tools", "tools"),
        ({"messages": [{"role": "user", "content": " "}, A]}, "empty_turn", "messages[0].content"),
        ({"prompt": "", "completion": "A"}, "empty_turn", "prompt"),
        ({"text": "\n"}, "empty_answer", "text"),
        ({}, "unknown_format", ""),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(row: dict[str, Any], reason: str, field: str) -> None:
    found = refusal(row)
    assert (found.reason, found.field) == (reason, field)


def test_a_response_template_marks_what_is_supervised() -> None:
    made = read({"text": "### Q: a ### A: b ### Q: c ### A: d"}, response_template="### A:")
    assert made.text[made.answer_start :] == " d"
    assert refusal({"text": "nothing"}, response_template="### A:").reason == "no_response_template"
    assert refusal({"text": "x ### A: "}, response_template="### A:").reason == "empty_answer"


def test_source_task_and_unused_fields() -> None:
    row = {"prompt": "Q", "completion": "A", "id": 7, "category": "maths", "meta": [1, "x", None]}
    made = read(row, source_field="category", task_field="category")
    assert (made.source, made.task, made.row_id) == ("maths", "maths", "7")
    assert made.extra == {"id": 7, "category": "maths", "meta": [1, "x", None]}
    assert refusal({"prompt": "Q", "completion": "A"}, task_field="category").reason == "no_task"


def test_policies_on_turns() -> None:
    merged = read({"messages": [Q, Q, A, A]})
    assert [m["content"] for m in merged.messages] == ["Q\n\nQ", "A\n\nA"]
    assert len(merged.mended) == 2
    apart = read({"messages": [Q, {**A, "train": False}, A]})
    assert [m.get("train") for m in apart.messages] == [None, False, None]
    assert refusal({"messages": [Q, Q, A]}, same_role_twice="refuse").field == "messages[1]"
    results = read(
        {
            "messages": [
                Q,
                {"role": "assistant", "tool_calls": [CALL, CALL]},
                {"role": "tool", "content": "1"},
                {"role": "tool", "content": "2"},
                A,
            ]
        }
    )
    assert [m["role"] for m in results.messages] == ["user", "assistant", "tool", "tool", "assistant"]
