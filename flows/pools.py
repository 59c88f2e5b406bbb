"""Work pools: where a worker runs flows, from the few settings in `infra/work_pools/KIND.yaml`.

A pool's template is Prefect's own for its kind, with our defaults and, where it is not enough, our part of the
configuration. No secret stands in it: MLflow's credentials are Prefect secret blocks that a worker resolves.
"""

from __future__ import annotations

import asyncio
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from data_contracts.errors import ConfigError, TransientError

FOLDER = Path(__file__).resolve().parent.parent / "infra" / "work_pools"
Kind = Literal["process", "docker", "kubernetes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_BLOCK = "prefect.blocks.secret."


def pool_name(kind: Kind) -> str:
    """Return what our work pool of a kind is called."""
    return f"lazytrain-{kind}"


def template(kind: Kind, base: dict[str, Any]) -> dict[str, Any]:
    """Return the job template of a kind: `base`, Prefect's own, with our defaults and configuration in it.

    Raises `ConfigError` for a default that Prefect's template has no variable for: it would pass silently.
    """
    ours = yaml.safe_load((FOLDER / f"{kind}.yaml").read_text(encoding="utf-8"))
    made = deepcopy(base)
    for name, value in ours["defaults"].items():
        known = made["variables"]["properties"]
        if name not in known:
            raise ConfigError(f"a variable of Prefect's {kind} template", f"{name!r}", f"one of {', '.join(known)}")
        known[name]["default"] = value
    made["job_configuration"].update(ours.get("configuration", {}))
    return made


def install(kind: Kind) -> str:
    """Make the pool of a kind on the server, or bring it up to date, with the secrets it refers to; return its name."""
    base = asyncio.run(get_default_base_job_template_for_infrastructure_type(kind))
    if base is None:
        raise TransientError(f"the Prefect server knows {kind} workers", "it did not say", "see that it answers")
    made = template(kind, base)
    if _BLOCK in json.dumps(made):
        _keep_credentials()
    name = pool_name(kind)
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=made))
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=made))
    return name


def _keep_credentials() -> None:
    """Keep MLflow's credentials of this environment as secret blocks, which the server encrypts."""
    missing = [name for name in CREDENTIALS if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            "MLflow's credentials are in the environment",
            f"{' and '.join(missing)} not set",
            "set them, then deploy again",
        )
    for name in CREDENTIALS:
        Secret(value=os.environ[name]).save(block_name(name), overwrite=True)


def block_name(variable: str) -> str:
    """Return the name of the secret block of an environment variable: lazytrain-mlflow-password."""
    return variable.replace("_TRACKING_", "_").lower().replace("_", "-").replace("mlflow", "lazytrain-mlflow")
