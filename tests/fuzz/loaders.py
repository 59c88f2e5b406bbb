"""What is fuzzed: every loader of text or bytes that comes from outside, as functions from bytes to nothing.

Each calls the product as a user's file would reach it, and lets nothing but the project's typed errors pass.
`python -m tests.fuzz.loaders NAME SECONDS` drives one by coverage (atheris), where that is installed.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from data_contracts.canonical import digest_of
from data_contracts.config import SLICES
from data_contracts.config_file import load
from data_contracts.contract import Contract
from data_contracts.errors import LazyTrainError
from data_contracts.records import CONTRACTS
from data_contracts.store.artifacts import validate
from stages.__main__ import read_request
from stages.admission import parse_slice
from stages.stage import VERBS, find_stage

TABLES = [contract for contract in CONTRACTS.values() if isinstance(contract, Contract)]
RECORDS = [contract for contract in CONTRACTS.values() if contract.kind == "record"]


def _file(name: str, data: bytes) -> Path:
    path = _HOME / name
    path.write_bytes(data)
    return path


_KEPT = tempfile.TemporaryDirectory(prefix="lazytrain-fuzz-")
_HOME = Path(_KEPT.name)


def config(data: bytes) -> None:
    """A configuration file, and every slice that a stage would make an identity of."""
    with contextlib.suppress(LazyTrainError):
        found = load(_file("lazytrain.yaml", data))
        for verb in SLICES:
            digest_of(found.slice(verb))
            parse_slice(find_stage(verb), found.slice(verb))


def request(data: bytes) -> None:
    """A request file of each stage, up to the point where its store would be opened."""
    path = _file("request.json", data)
    for verb in VERBS:
        with contextlib.suppress(LazyTrainError):
            found = read_request(path, verb)
            parse_slice(find_stage(verb), found.config)
            digest_of(found.config)


def table(data: bytes) -> None:
    """Bytes as the payload of each table contract."""
    folder = _HOME / "table"
    folder.mkdir(exist_ok=True)
    (folder / "data.arrow").write_bytes(data)
    for contract in TABLES:
        with contextlib.suppress(LazyTrainError):
            validate(contract, folder, ["data.arrow"])


def record(data: bytes) -> None:
    """Bytes as each record."""
    folder = _HOME / "record"
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_bytes(data)
    for contract in RECORDS:
        with contextlib.suppress(LazyTrainError):
            validate(contract, folder, ["record.json"])


LOADERS: dict[str, Callable[[bytes], None]] = {"config": config, "request": request, "table": table, "record": record}


def sample_table(contract: Contract) -> bytes:
    """Return a stream file of the contract's schema without rows: what a mutation starts from."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, contract.schema) as writer:
        writer.write_table(contract.schema.empty_table())
    return sink.getvalue()


def main() -> None:
    """Fuzz one loader by coverage for a bounded time; anything but a typed error ends the process with a trace."""
    import atheris

    name, seconds = sys.argv[1], int(sys.argv[2])
    for module in ("data_contracts.config", "data_contracts.contract", "data_contracts.method", "stages.__main__"):
        for value in vars(sys.modules[module]).values():
            if callable(value) and getattr(value, "__module__", "") == module and hasattr(value, "__code__"):
                atheris.instrument_func(value)
    corpus = Path(tempfile.mkdtemp(dir=_HOME))
    for number, seed in enumerate(SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=65536", str(corpus)], LOADERS[name])
    atheris.Fuzz()


_CONFIG = b"name: a\nmodel: {path: m}\ndata: {pool: p.jsonl, target: t.jsonl}\nbudget: {peak_bytes: 2GB, seconds: 2h}\n"
_REQUEST = (
    b'{"verb": "select", "config": {"seed": 1, "select": {"fraction": 0.1}}, '
    b'"store": {"tracking_uri": "sqlite:///a.db", "work_uri": "w"}}'
)
SEEDS: dict[str, list[bytes]] = {
    "config": [_CONFIG, b"a: &a [1, 2]\nb: *a\n", b"<<: {a: 1}\n"],
    "request": [_REQUEST],
    "table": [sample_table(contract) for contract in TABLES],
    "record": [b'{"action": "stop", "reason": "r", "round": 1}', b"{}"],
}

if __name__ == "__main__":
    main()
