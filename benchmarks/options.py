"""The options that all benchmarks on real data share: `--quick`, and where the data lie."""

from __future__ import annotations

import argparse
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


class Options(argparse.ArgumentParser):
    """A parser with `--quick` and `--data`; `read` stops where the data folder is absent."""

    def __init__(self, doc: str | None, quick: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument("--data", type=Path, default=DATA, help="folder of the data (shared/data beside the project)")

    def read(self) -> argparse.Namespace:
        """Return the options given."""
        given = self.parse_args()
        if not given.data.is_dir():
            raise SystemExit(f"{self.prog} needs the data folder: {given.data} is absent (--data FOLDER)")
        return given
