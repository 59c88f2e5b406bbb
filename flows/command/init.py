"""`lazytrain init`: a short commented configuration for your model, pool, target and budget.

It asks for what was not given (on a terminal), looks at the files (format, rows, fields) and writes nothing that it did
not check. `--schema` prints the JSON Schema of the configuration for editors.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import sys
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from data_contracts.config import ARMS
from data_contracts.config_file import json_schema, parse
from data_contracts.errors import ConfigError, InputError
from flows.command.plain import model_of
from flows.command.screen import console
from flows.workspace import CONFIG_FILE

app = typer.Typer(add_completion=False)

LOOKED_AT = 10_000
"""Rows that are looked at; more are said to be more."""

TIMES, MEMORIES = ("s", "m", "min", "h", "d"), ("b", "kb", "mb", "gb", "tb", "kib", "mib", "gib")


@app.command()
def init(
    model: Annotated[str | None, typer.Option(help="A model's folder, or a hub name.")] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="Files or folders that may be trained on; may be repeated.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="Files that show what good means; may be repeated.")] = None,
    budget: Annotated[str | None, typer.Option(help='Such as "24GB 2h", "6GB 1e15flops", "80GB 5e8tokens".')] = None,
    out: Annotated[Path, typer.Option(help="Where the configuration goes.")] = Path(CONFIG_FILE),
    force: Annotated[bool, typer.Option("--force", help="Replace a configuration that is there.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the configuration and end.")
    ] = False,
) -> None:
    """Write a short commented configuration for your model, pool, target and budget."""
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if out.exists() and not force:
        raise ConfigError(
            f"{out} is not there yet", "it is", "choose another name with --out, or --force to replace it"
        )
    model = model or _ask("--model", "model (a folder or a hub name)")
    pool = pool or _ask("--pool", "pool (files to choose training examples from)").split()
    target = target or _ask("--target", "target (files that show what good means)").split()
    budget = budget or _ask("--budget", "budget (memory and time or FLOPs)", "6GB 1h")
    content = written(model, pool, target, budget, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} can be written", str(error.strerror), "choose another place with --out") from error
    console().print(f"wrote {out}; next: lazytrain plan {shlex.quote(str(out))}", soft_wrap=True, markup=False)


def _ask(option: str, what: str, default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"`{option}` is given, or a terminal to ask on", "neither", f"pass {option}")
    answer: str = typer.prompt(what, default=default)
    return answer


def parse_budget(words: str) -> dict[str, str | int]:
    """Turn such as `24GB 2h 1e15flops` into the budget section. Raises `ConfigError` naming the part it cannot read."""
    budget: dict[str, str | int] = {}
    for word in re.split(r"[\s,]+", words.strip()):
        match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]+)", word)
        unit = match[2].lower() if match and math.isfinite(float(match[1])) else ""
        if unit in MEMORIES:
            budget["peak_bytes"] = word
        elif unit in TIMES:
            budget["seconds"] = word
        elif match and unit in ("flop", "flops", "tokens"):
            budget["tokens" if unit == "tokens" else "flops"] = int(float(match[1]))
        else:
            raise ConfigError(
                "a budget of parts such as 24GB, 2h, 1e15flops, 5e8tokens",
                f"the part {word!r}",
                "give a number and a unit",
            )
    return budget


def written(model: str, pool: list[str], target: list[str], budget: str, out: Path) -> str:
    """Return the configuration's text, its paths relative to `out`, checked against the schema and the files."""
    for item in (*pool, *target, model):
        if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in item):
            raise ConfigError(
                "names that can stand in a configuration",
                f"{item!r} cannot",
                "rename it: UTF-8 without control characters",
            )
    looks = {"pool": [look(Path(item)) for item in pool], "target": [look(Path(item)) for item in target]}
    place = out.resolve().parent
    section = model_of(model)
    values: dict[str, Any] = {
        "model": {"path": _relative(model, place)} if section.get("path") else section,
        "data": {
            "pool": [_relative(item, place) for item in pool],
            "target": [_relative(item, place) for item in target],
        },
        "budget": parse_budget(budget),
    }
    parse(values, str(out))
    lines = [
        "# LazyTrain: every key that is left out has a default; `lazytrain init --schema` lists them all.",
        f"name: {json.dumps(re.sub(r'[^A-Za-z0-9._-]+', '-', place.name).strip('-._') or 'run')}",
        "seed: 0",
        "",
        "model:  # a folder (safetensors or one GGUF file), or a hub name",
        *_section(values["model"]),
        "",
        "data:  # validation and holdout are cut from the target unless given here; retention: what not to forget",
        *(f"  # {name} {line}" for name, found in looks.items() for line in found),
        *_section(values["data"]),
        "",
        "budget:  # peak_bytes is the memory of one worker; flops, seconds, tokens are for the whole run",
        *_section(values["budget"]),
        "",
        "auto:  # ways of choosing, chance first: words tell which pays, or short trainings (3 % at most)",
        f"  arms: [{', '.join(ARMS)}]",
        "",
        "select:",
        "  include_target: true  # the target's rows are trained on too",
        "",
        "govern:",
        "  rounds: 3  # most turns of score, select, train",
        "",
    ]
    content = "\n".join(lines)
    parse(yaml.safe_load(content), str(out))
    return content


def _section(values: dict[str, Any]) -> list[str]:
    return [f"  {line}" for line in yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines()]


def _relative(item: str, place: Path) -> str:
    path = Path(item).expanduser()
    if not path.exists():
        return item
    path = path.resolve()
    return path.relative_to(place).as_posix() if path.is_relative_to(place) else path.as_posix()


def look(path: Path) -> str:
    """Return one line on what a file or folder holds: rows, formats, fields.

    Raises `InputError` for one that is not there, or of which no row can be read; a hub name is taken as it is.
    """
    from stages.ingest.compressed import bare_suffix
    from stages.ingest.readers import SUFFIXES

    if not path.exists():
        if len(path.parts) == 2 and not path.suffix:
            return f"{path}: a hub name, read when it is fetched"
        raise InputError("a file or folder of data", f"{path} is not there", "check the path")
    files = sorted(item for item in path.rglob("*") if bare_suffix(item.name) in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds data files", "it holds none", f"readable: {', '.join(SUFFIXES)}")
    return f"{path.name}: {_found(files)}"


def _found(files: list[Path]) -> str:
    """Count rows, formats and fields of the first `LOOKED_AT` rows."""
    from data_contracts.config import IngestConfig
    from stages.ingest.formats import Formats
    from stages.ingest.readers import read_records
    from stages.text.refusal import Refused

    settings = IngestConfig()
    formats, fields, rows, faults = Counter[str](), Counter[str](), 0, [""]
    reader = Formats(settings)
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            records = read_records(file, file.name, settings.longest_row_bytes, lambda count: None, Path(scratch))
            for record in itertools.islice(records, LOOKED_AT - rows):
                rows += 1
                if record.value is None:
                    faults.append(f"{file.name} row {record.row}: {record.fault.detail if record.fault else ''}")
                    continue
                fields.update(record.value)
                try:
                    formats[reader.detect(record.value)] += 1
                except Refused as fault:
                    faults.append(f"{file.name} row {record.row}: {fault.detail}")
    if not formats:
        found = f"{files[0]}: none of {rows}; {faults[-1]}" if rows else f"{files[0]} is empty"
        raise InputError("a row that can be read", found, "see `lazytrain ingest --pool`")
    more = "at least " if rows == LOOKED_AT else ""
    kinds = ", ".join(f"{name} ({count})" if len(formats) > 1 else name for name, count in formats.most_common())
    unread = f"; {len(faults) - 1} cannot be read" if len(faults) > 1 else ""
    names = ", ".join(name for name, _ in fields.most_common(8))
    return f"{more}{rows} rows, format {kinds}, fields {names}{unread}"
