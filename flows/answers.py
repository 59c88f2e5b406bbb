"""What a Prefect server that refuses or does not answer means, in this project's errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from data_contracts.errors import ConfigError, TransientError


@contextmanager
def server_answers(remedy: str = "see that it runs and is reachable") -> Iterator[None]:
    """Raise, for what Prefect's clients raise inside, `ConfigError` (refused) or `TransientError` (no answer)."""
    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:
        cause = error if isinstance(error, httpx.HTTPError) else error.__cause__  # "Failed to reach API at …"
        if not isinstance(cause, httpx.HTTPError):
            raise
        server = f"the Prefect server {os.environ.get('PREFECT_API_URL', 'of this process')}"
        if isinstance(cause, httpx.HTTPStatusError) and cause.response.is_client_error:
            raise ConfigError(
                f"{server} takes what it is given",
                f"it answers {cause.response.status_code}: {cause.response.text[:300]}",
                "where that is 401, set PREFECT_API_AUTH_STRING to user:password",
            ) from error
        raise TransientError(f"{server} answers", f"{type(cause).__name__}: {cause}", remedy) from error
