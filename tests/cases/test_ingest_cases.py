"""Inputs that broke other tools, by the id of their case: what ingest must make of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import DataConfig, IngestConfig, ModelConfig
from data_contracts.errors import InputError
from stages.ingest.plain import GIVES, ingest_files
from stages.ingest.stage import STAGE, IngestSlice
from tests.local_work import LocalWork

pytestmark = pytest.mark.shared


@pytest.fixture
def case(shared: Path):
    return lambda name: next((shared / "cases" / "files").glob(f"{name}-*"))


class Outcome:
    def __init__(self, work: LocalWork, summary: Any, model: bool) -> None:
        self.work, self.summary = work, summary
        self.rows = sorted(work.rows("pool"), key=lambda row: row["row"])
        self.refused = work.rows("quarantine")
        self.tokens = {row["example_id"]: row for row in work.rows("pool_tokens")} if model else {}

    def messages(self) -> list[list[dict[str, Any]]]:
        return [json.loads(row["messages"]) for row in self.rows]

    def answers(self) -> list[str]:
        return [messages[-1]["content"] for messages in self.messages()]

    def of(self, row_id: str) -> dict[str, Any]:
        row = next(row for row in self.rows if json.loads(row["extra"]).get("id") == row_id)
        return row | self.tokens.get(row["example_id"], {})


def ingest(
    tmp_path: Path, folder: Path, file: str = "pool.jsonl", model: Path | None = None, **settings: Any
) -> Outcome:
    work = LocalWork(tmp_path / f"work-{len(list(tmp_path.iterdir()))}", GIVES)
    summary = ingest_files(
        [str(folder / file)],
        model=ModelConfig(path=str(model)) if model else None,
        settings=IngestConfig(**settings),
        work=work,
        root=folder,
    )
    return Outcome(work, summary, model is not None)


def tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def supervised(outcome: Outcome, row_id: str, folder: Path) -> str:
    row = outcome.of(row_id)
    kept = [token for token, answer in zip(row["input_ids"], row["answer_mask"], strict=True) if answer]
    return tokenizer(folder).decode(kept)


def whole(outcome: Outcome, row_id: str, folder: Path) -> str:
    return tokenizer(folder).decode(outcome.of(row_id)["input_ids"])


def test_I01_nested_type_change(case, tmp_path: Path) -> None:
    folder = case("I01")
    outcome = ingest(tmp_path, folder)
    given = [json.loads(line) for line in (folder / "pool.jsonl").read_text().splitlines()]
    assert not outcome.refused
    assert outcome.messages() == [row["messages"] for row in given]
    assert [json.loads(row["extra"])["meta"] for row in outcome.rows] == [row["meta"] for row in given]


def test_I02_tool_schema_nulls(case, tmp_path: Path) -> None:
    folder = case("I02")
    outcome = ingest(tmp_path, folder, model=folder / "model")
    assert len(outcome.rows) == 2
    assert not outcome.refused
    properties = [
        sorted(
            key
            for tool in json.loads(outcome.of(name)["tools"])
            for key in tool["function"]["parameters"]["properties"]
        )
        for name in ("t1", "t2")
    ]
    assert properties == [["city"], ["amount", "currency"]]
    call = json.loads(outcome.of("t2")["messages"])[1]["tool_calls"][0]["function"]
    assert call == {"name": "now", "arguments": {}}
    texts = {name: whole(outcome, name, folder / "model") for name in ("t1", "t2")}
    assert all(word not in text for text in texts.values() for word in ("null", "None"))
    assert "amount" not in texts["t1"]
    assert "currency" not in texts["t1"]
    for name, answer, result in (("t1", "18 degrees.", "18C"), ("t2", "Half past nine.", "09:30")):
        learnt = supervised(outcome, name, folder / "model")
        assert answer in learnt
        assert '"name"' in learnt  # the call is learnt
        assert result not in learnt  # the result is not


def test_I02_tool_schema_nulls_from_a_columnar_file(case, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = case("I02")
    rows = [json.loads(line) for line in (folder / "pool.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pool.parquet")
    outcome = ingest(tmp_path, tmp_path, "pool.parquet", model=folder / "model")
    assert len(outcome.rows) == 2
    text = whole(outcome, "t1", folder / "model")
    assert all(word not in text for word in ("null", "None", "amount", "currency"))


def test_I03_csv_null_words(case, tmp_path: Path) -> None:
    outcome = ingest(tmp_path, case("I03"), "pool.csv")
    assert outcome.answers() == ["null", "NA", "None", "nan", "N/A", "007", "true"]
    assert outcome.messages()[6][0]["content"] == "First line.\nSecond line: is water wet?"
    (refused,) = outcome.refused
    assert (refused["row"], refused["line"], refused["field"]) == (8, 10, "output")
    assert "empty answer" in refused["detail"]


def test_I04_mixed_schemas_and_roles(case, tmp_path: Path) -> None:
    lima = [{"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
    outcome = ingest(tmp_path, case("I04"), dedupe="none")
    assert outcome.messages() == [lima] * 4
    (refused,) = outcome.refused
    assert (refused["line"], refused["field"]) == (5, "conversations[0].from")
    assert all(word in refused["detail"] for word in ("'narrator'", "assistant", "user", "ingest.roles"))


def test_I04_with_deduplication_the_four_are_one_row_and_three_copies_of_it(case, tmp_path: Path) -> None:
    outcome = ingest(tmp_path, case("I04"))
    assert [row["row"] for row in outcome.rows] == [1]
    assert [row["reason"] for row in outcome.refused] == ["duplicate"] * 3 + ["unknown_role"]
    mapped = ingest(tmp_path, case("I04"), dedupe="none", roles={"narrator": "user"})
    assert len(mapped.rows) == 5


def test_I05_none_and_empty_turns(case, tmp_path: Path) -> None:
    outcome = ingest(tmp_path, case("I05"))
    assert [json.loads(row["extra"])["id"] for row in outcome.rows] == ["e7"]
    found = [(row["line"], row["field"], row["reason"]) for row in outcome.refused]
    answer = "messages[1].content"
    assert found == [
        (1, "messages", "no_messages"),
        (2, "messages", "no_messages"),
        (3, answer, "empty_answer"),
        (4, answer, "empty_answer"),
        (5, answer, "empty_answer"),
        (6, "messages", "no_answer"),
    ]
    assert all(f"'e{i}'" in row["detail"] for i, row in enumerate(outcome.refused, start=1))
    for word, row in zip(
        ("null", "empty", "empty", "null", "blank", "no assistant turn"), outcome.refused, strict=True
    ):
        assert word in row["detail"]


def test_I05_a_file_without_a_usable_row_stops_before_a_model_is_looked_at(case, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no usable row: 0 of 1 .*line 1 .*empty answer") as error:
        ingest(tmp_path, case("I05"), "all_bad.jsonl", model=tmp_path / "no such model")
    assert error.value.exit_code != 0


def test_I06_same_role_twice(case, tmp_path: Path) -> None:
    folder = case("I06")
    outcome = ingest(tmp_path, folder, model=folder / "model")
    assert len(outcome.rows) + len(outcome.refused) == 3
    (changes,) = [table for table in outcome.summary.tables if "changed by a policy" in table.title]
    told = {row[3]: row[4] for row in changes.rows}
    assert set(told) == {"r1", "r2"}
    assert "turn 3" in told["r1"]
    assert "dropped" in told["r1"]
    assert "turn 1" in told["r2"]
    assert "merged" in told["r2"]
    alone = tmp_path / "alone.jsonl"
    alone.write_text((folder / "pool.jsonl").read_text().splitlines()[2] + "\n")
    assert (
        ingest(tmp_path, tmp_path, "alone.jsonl", model=folder / "model").of("r3")["input_ids"]
        == outcome.of("r3")["input_ids"]
    )
    assert supervised(outcome, "r1", folder / "model") == "Uno.<eos>"
    assert supervised(outcome, "r2", folder / "model") == "Tres.<eos>"
    assert supervised(outcome, "r3", folder / "model") == "Cuatro.<eos>"


def test_I06_refused_where_the_policy_says_so(case, tmp_path: Path) -> None:
    outcome = ingest(tmp_path, case("I06"), same_role_twice="refuse")
    assert [(row["reason"], row["field"]) for row in outcome.refused] == [
        ("same_role_twice", "messages[3]"),
        ("same_role_twice", "messages[1]"),
    ]


def test_I07_system_role_refused(case, tmp_path: Path) -> None:
    folder = case("I07")
    outcome = ingest(tmp_path, folder, model=folder / "model")
    assert any("system role folded: 1 of 2 rows" in notice for notice in outcome.work.notices)
    text = whole(outcome, "s1", folder / "model")
    assert text.count("Answer in French.") == 1
    assert supervised(outcome, "s1", folder / "model") == "Bonjour.<eos>"
    refusing = ingest(tmp_path, folder, model=folder / "model", system_role="refuse")
    (refused,) = refusing.refused
    assert refused["field"] == "messages[0].role"
    assert all(word in refused["detail"] for word in ("'system'", "'s1'", "ingest.system_role"))
    assert refusing.of("s2")["input_ids"] == outcome.of("s2")["input_ids"]


@pytest.mark.parametrize("dedupe", ["near", "exact"])
def test_I08_short_texts_deduped_away(case, tmp_path: Path, dedupe: str) -> None:
    outcome = ingest(tmp_path, case("I08"), dedupe=dedupe)
    assert [json.loads(row["extra"])["id"] for row in outcome.rows] == ["d1", "d2", "d3", "d4", "d6"]
    (refused,) = outcome.refused
    assert "'d5'" in refused["detail"]
    assert "duplicate_of d1" in refused["detail"]


def test_I09_unicode_line_separators(case, tmp_path: Path) -> None:
    outcome = ingest(tmp_path, case("I09"))
    assert outcome.answers() == ["a\u2028b", "c\u0085d\u2029e", "plain"]
    assert not outcome.refused


def test_I10_cache_kept_across_tokenizers(case, tmp_path: Path) -> None:
    folder = case("I10")
    ids = {name: ingest(tmp_path, folder, model=folder / name).of("k1")["input_ids"] for name in ("tok_a", "tok_b")}
    assert [i for i in ids["tok_a"] if i in (104, 105)] == [104, 105]
    assert [i for i in ids["tok_b"] if i in (151, 150)] == [151, 150]


def test_I10_the_identity_covers_the_tokenizers_content_and_no_path(case, shared: Path, tmp_path: Path) -> None:
    folder = case("I10")
    for name in ("tok_a", "tok_b", "elsewhere"):
        shutil.copytree(shared / "data" / "stories260k", tmp_path / name / "model")
        shutil.copy(folder / "pool.jsonl", tmp_path / name / "pool.jsonl")
        for file in (folder / name.replace("elsewhere", "tok_a")).iterdir():
            shutil.copy(file, tmp_path / name / "model" / file.name)
    config = IngestSlice(
        seed=0,
        model=ModelConfig(path="model"),
        data=DataConfig(pool=("pool.jsonl",), target=("pool.jsonl",)),
        ingest=IngestConfig(),
    )
    first = STAGE.external(config, tmp_path / "tok_a")
    assert first == STAGE.external(config, tmp_path / "elsewhere")
    second = STAGE.external(config, tmp_path / "tok_b")
    assert first != second
    for file in (folder / "tok_b").iterdir():
        shutil.copy(file, tmp_path / "tok_a" / "model" / file.name)
    assert STAGE.external(config, tmp_path / "tok_a") == second
    assert str(tmp_path) not in json.dumps(second)


@pytest.mark.slow
def test_I10_cache_kept_across_tokenizers_through_the_runner(case, shared: Path, tmp_path: Path) -> None:
    from data_contracts.arrow import read_table
    from data_contracts.records import Request
    from data_contracts.store import Store
    from stages.runner import run
    from tests.stores import blank

    folder = case("I10")
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(3)
    ]
    (tmp_path / "target.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(folder / "pool.jsonl", tmp_path / "pool.jsonl")
    for name in ("tok_a", "tok_b"):
        shutil.copytree(shared / "data" / "stories260k", tmp_path / name)
        for file in (folder / name).iterdir():
            shutil.copy(file, tmp_path / name / file.name)
    address = blank(tmp_path)

    def ids(model: str) -> tuple[list[int], bool]:
        config = {
            "seed": 0,
            "model": ModelConfig(path=model).model_dump(mode="json"),
            "data": DataConfig(pool=("pool.jsonl",), target=("target.jsonl",)).model_dump(mode="json"),
            "ingest": IngestConfig().model_dump(mode="json"),
        }
        result = run(Request(verb="ingest", config=config, store=address, knobs={"root": str(tmp_path)}))
        table = read_table(Store(address).open(result.refs["pool_tokens"]) / "data.arrow")
        return table.column("input_ids")[0].as_py(), result.cached

    first, second = ids("tok_a"), ids("tok_b")
    again = ids("tok_a")
    for file in (folder / "tok_b").iterdir():
        shutil.copy(file, tmp_path / "tok_a" / file.name)
    third = ids("tok_a")
    assert not first[1]
    assert not second[1]
    assert again == (first[0], True)
    assert "".join(map(chr, first[0])).startswith("U:hi")
    assert [255 - i for i in second[0][:4]] == first[0][:4]
    assert third[0] == second[0]
