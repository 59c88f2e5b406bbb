"""A URI that is recorded: it may name a user, never a secret.

Addresses of stores stand in requests, manifests, run records and pages. What opens them comes from the environment.
Of the standard library and pydantic alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

SECRET = "secret"  # noqa: S105 - the error's type: whoever shows such an error leaves the value out
_IN_QUERY = re.compile(r"[?&](password|passwd|pwd|token|secret|sig|signature)=", re.IGNORECASE)


def _without_secret(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        secret = urlsplit(value).password is not None or _IN_QUERY.search(value) is not None
    except ValueError:
        secret = "@" in value  # not a URI that can be taken apart: nothing of it is shown where it may hold a password
    if secret:
        raise PydanticCustomError(
            SECRET,
            "a URI without a password, since it stands in the run's record; give it by the environment: "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for a server, PGPASSWORD for PostgreSQL",
        )
    if "\0" in value:
        raise PydanticCustomError("uri", "a URI without NUL")
    return value


Uri = Annotated[str, BeforeValidator(_without_secret)]
