"""Makes small inputs and runs ingest on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_contracts.config import DataConfig, IngestConfig, ModelConfig
from stages.ingest.plain import GIVES, ingest_files
from stages.ingest.stage import STAGE, IngestSlice
from stages.stage import Inputs
from tests.local_work import LocalWork, work_for


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pool(
    tmp_path: Path, *names: str, root: Path | None = None, model: Path | None = None, **settings: Any
) -> LocalWork:
    """Ingest a pool alone and return the work, its counts checked."""
    work = LocalWork(tmp_path / f"work-{len(list(tmp_path.iterdir()))}", GIVES)
    summary = ingest_files(
        names,
        model=ModelConfig(path=str(model)) if model else None,
        settings=IngestConfig(**settings),
        work=work,
        root=root or tmp_path,
    )
    facts = summary.facts
    assert facts["rows read"] == facts["rows kept"] + facts["rows quarantined"]
    assert facts["rows kept"] == len(work.rows("pool"))
    assert facts["rows quarantined"] == len(work.rows("quarantine"))
    return work


def answers(work: LocalWork) -> list[str]:
    """Return the answers of the pool in file order."""
    rows = sorted(work.rows("pool"), key=lambda row: (row["file"], row["row"]))
    return [json.loads(row["messages"])[-1]["content"] if row["messages"] else row["text"] for row in rows]


def reasons(work: LocalWork) -> list[tuple[int, str]]:
    return [(row["row"], row["reason"]) for row in work.rows("quarantine")]


def stage(tmp_path: Path, model: Path, data: dict[str, Any], seed: int = 0, **settings: Any) -> tuple[LocalWork, Any]:
    """Run the whole stage on files under `tmp_path`."""
    config = IngestSlice(
        seed=seed, model=ModelConfig(path=str(model)), data=DataConfig(**data), ingest=IngestConfig(**settings)
    )
    work = work_for(STAGE, tmp_path / f"work-{len(list(tmp_path.iterdir()))}", seed=seed, root=tmp_path)
    return work, STAGE.run(config, Inputs({}), work)
