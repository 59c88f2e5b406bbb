"""`prefect.yaml` deploys the pipeline on a schedule and every stage on demand, by Prefect's own reading of it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stages.stage import VERBS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def file():
    from prefect.cli.deploy._models import PrefectYamlModel

    return PrefectYamlModel.model_validate(yaml.safe_load((ROOT / "prefect.yaml").read_text()))


def test_it_holds_the_pipeline_and_every_stage(file):
    points = [deployment.entrypoint for deployment in file.deployments]
    assert points == ["flows/pipeline.py:pipeline", *(f"flows/stage_flows.py:{verb}" for verb in VERBS)]


def test_every_entry_point_is_a_flow_that_takes_the_parameters(file, monkeypatch):
    from prefect.flows import load_flow_from_entrypoint

    monkeypatch.chdir(ROOT)
    for deployment in file.deployments:
        flow = load_flow_from_entrypoint(deployment.entrypoint)
        assert set(deployment.parameters) <= set(inspect.signature(flow.fn).parameters)
        flow.validate_parameters(deployment.parameters)


def test_the_pipeline_runs_on_a_cron_that_prefect_accepts(file):
    from prefect.client.schemas.schedules import CronSchedule

    (schedule,) = file.deployments[0].schedules
    assert CronSchedule(cron=schedule.cron, timezone=schedule.timezone).cron == "0 2 * * *"


def test_no_deployment_has_a_key_that_prefect_would_ignore():
    from prefect.cli.deploy._models import DeploymentConfig

    known = set(DeploymentConfig.model_fields)
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        assert set(deployment) <= known


@pytest.mark.slow
def test_a_real_server_takes_all_of_them(tmp_path):
    env = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    env["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "true"
    code = (
        "from prefect.testing.utilities import prefect_test_harness\n"
        "import subprocess, sys\n"
        "with prefect_test_harness(server_startup_timeout=120):\n"
        "    from prefect.settings import PREFECT_API_URL, get_current_settings\n"
        "    env = {**__import__('os').environ, **get_current_settings().to_environment_variables(exclude_unset=True)}\n"
        "    for line in (['work-pool', 'create', 'lazytrain', '--type', 'process'], ['--no-prompt', 'deploy', '--all']):\n"
        "        subprocess.run([sys.executable, '-m', 'prefect', *line], check=True, env=env)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("successfully created") >= len(VERBS) + 1, done.stdout
