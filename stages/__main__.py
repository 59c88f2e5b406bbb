"""`python -m stages NAME request.json`: one stage's work in a process of its own, as a container runs it.

Reads a Request, prints the Result as one line of JSON on standard output, logs to standard error. Exit codes: 0
committed or adopted, 2 refused, 3 retryable, 143 terminated. What takes time is imported after SIGTERM is handled: as
the first process of a container, Python would otherwise ignore it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from data_contracts.errors import EXIT_COMMITTED, EXIT_RETRYABLE, ArtifactError, ConfigError, LazyTrainError
from stages.ending import terminated_by_signal

if TYPE_CHECKING:
    from data_contracts.records import Request

LARGEST_REQUEST_BYTES = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Run one request and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages", description=__doc__)
    parser.add_argument("name", help="the stage, such as score")
    parser.add_argument("request", type=Path, help="a JSON file that holds the request")
    given = parser.parse_args(arguments)
    with terminated_by_signal():  # from the first moment: the first process of a container ignores SIGTERM by default
        return _answer(given)


def _answer(given: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    try:
        refuse_foreign_packages()
        request = read_request(given.request, given.name)
        from stages.runner import run

        result = run(request)
    except LazyTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    except Exception:  # a fault of ours or of the machine: shown whole; trying again may help
        traceback.print_exc()
        return EXIT_RETRYABLE
    sys.stdout.write(result.model_dump_json() + "\n")
    return EXIT_COMMITTED


def read_request(path: Path, name: str) -> Request:
    """Read and check a request file. Raises `ConfigError` for one that is missing, too large or invalid."""
    from pydantic import ValidationError

    from data_contracts.method import describe
    from data_contracts.records import Request

    try:
        size = path.stat().st_size
        if size > LARGEST_REQUEST_BYTES:
            raise ConfigError(
                f"a request of at most {LARGEST_REQUEST_BYTES} bytes", f"{path} has {size}", "pass references, not data"
            )
        request = Request.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} is a readable file", str(error), "give the path of a request") from error
    except ValidationError as error:
        found = describe(error, Request, "")
        raise ConfigError(f"{path} holds a request", found, "see data_contracts/records.py: Request") from error
    if request.verb != name:
        raise ConfigError(
            f"a request for {name}", f"{path} asks for {request.verb}", f"run `python -m stages {request.verb}`"
        )
    return request


def refuse_foreign_packages() -> None:
    """Raise `ArtifactError` where `data_contracts` or `stages` would come from another place than this file."""
    root = Path(__file__).resolve().parent.parent
    for package in ("stages", "data_contracts"):
        spec = find_spec(package)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
        if places != [root / package]:
            raise ArtifactError(
                f"the package `{package}` is {root / package}",
                f"Python finds {', '.join(map(str, places)) or 'none'}",
                "run with `python -P -m stages` from the project, or remove the other package from the path",
            )


if __name__ == "__main__":
    sys.exit(main())
