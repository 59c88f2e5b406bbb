"""Legal names: any text to a name that MLflow takes for a param, metric or tag, and back.

Promises that distinct texts never collapse into one name: `hits@1` becomes `hits_u40_1`, while `hits_at_1` stays. A
character outside `A-Z a-z 0-9 _ - . / space` becomes `_u<hex>_`; an underscore that would read as such an escape is
escaped itself; a text too long ends in its sha256. The original stands in the manifest's summary and in a tag.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from typing import Any

LONGEST = 200  # of MLflow's 250, to leave room for a prefix

_ILLEGAL = re.compile(r"[^A-Za-z0-9_\-./ ]|_(?=u[0-9a-fh])")
_PATHLIKE = re.compile(r"[./ ]")
_ESCAPE = re.compile(r"_u([0-9a-f]+)_")


def legal(text: str) -> str:
    """Return the legal name of `text` (at least one character), one name a text. Raises ValueError for empty text."""
    if not text:
        raise ValueError("an empty text has no name")
    name = _ILLEGAL.sub(_escaped, text)
    if posixpath.normpath(name) != name or name.startswith((".", "/")) or name != name.strip():
        name = _PATHLIKE.sub(_escaped, name)
    if len(name) > LONGEST:
        # h is no hex digit, so "_uh_" is no escape; and no short name holds it, since its underscore is escaped
        name = f"{name[:120]}_uh_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return name


def _escaped(match: re.Match[str]) -> str:
    return f"_u{ord(match.group()):x}_"


def original(name: str) -> str:
    """Return the text that `legal` made `name` from, where it was not too long."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), name)


def renamed(texts: Mapping[str, Any]) -> dict[str, str]:
    """Return legal name → text for those texts whose name had to change."""
    return {legal(text): text for text in texts if legal(text) != text}
