"""`prefect.yaml` and `lazytrain deploy`: every stage on every kind of pool, by Prefect's own reading and a real server."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
import yaml

from flows.automations import START_SECONDS
from flows.order import settings_of
from flows.pools import KINDS, block_name
from flows.workspace import Workspace
from stages.stage import VERBS
from tests.command import lazytrain
from tests.conftest import ROOT
from tests.infra.services import Prefect

NAMES = ("pipeline", *VERBS)
WORDS = {"MLFLOW_TRACKING_USERNAME": "team-account", "MLFLOW_TRACKING_PASSWORD": "a password nobody may see"}


@pytest.fixture(scope="module")
def file() -> Any:
    from prefect.cli.deploy._models import PrefectYamlModel

    return PrefectYamlModel.model_validate(yaml.safe_load((ROOT / "prefect.yaml").read_text()))


def test_it_holds_the_pipeline_and_every_stage_on_every_kind_of_pool(file: Any) -> None:
    found = [(item.name, item.entrypoint, item.work_pool.name) for item in file.deployments]
    points = ["flows/pipeline.py:pipeline", *(f"flows/stage_flows.py:{verb}" for verb in VERBS)]
    assert found == [(kind, point, f"lazytrain-{kind}") for kind in KINDS for point in points]


def test_every_entry_point_is_a_flow_that_takes_the_parameters(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.flows import load_flow_from_entrypoint

    monkeypatch.chdir(ROOT)
    for deployment in file.deployments:
        flow = load_flow_from_entrypoint(deployment.entrypoint)
        assert set(deployment.parameters) <= set(inspect.signature(flow.fn).parameters)
        flow.validate_parameters(deployment.parameters)


def test_each_pipeline_runs_on_a_cron_that_prefect_accepts_one_at_a_time(file: Any) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    for deployment in file.deployments:
        limit = deployment.concurrency_limit
        assert (limit.limit, limit.collision_strategy) == (1, "ENQUEUE")
        assert limit.grace_period_seconds > START_SECONDS, "a lost start is closed before its slot's lease ends"
        if deployment.entrypoint.endswith(":pipeline"):
            (schedule,) = deployment.schedules
            assert CronSchedule(cron=schedule.cron, timezone=schedule.timezone).cron == "0 2 * * *"


def test_no_deployment_has_a_key_that_prefect_would_ignore() -> None:
    from prefect.cli.deploy._models import DeploymentConfig

    known = set(DeploymentConfig.model_fields)
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        assert set(deployment) <= known


@pytest.mark.parametrize("verb", VERBS)
def test_settings_that_travel_are_the_slice_they_came_from(verb: str, tmp_path: Any) -> None:
    path = tmp_path / "lazytrain.yaml"
    values = {"model": {"path": "m"}, "data": {"pool": "p", "target": "t"}}
    changed = {
        **values,
        "seed": 7,
        "budget": {"peak_bytes": "3GiB", "seconds": "2h"},
        "select": {"count": 3},
        "judge": {"gates": [{"method": "better_than_base"}]},
        "train": {"learning_rate": 1e-3, "decay": "cosine"},
    }
    path.write_text(yaml.safe_dump(values))
    there = Workspace.read(path)
    path.write_text(yaml.safe_dump(changed))
    here = Workspace.read(path)
    travelled = json.loads(json.dumps(here.config.slice(verb)))
    assert settings_of(verb).model_validate(travelled).over(there).config.slice(verb) == here.config.slice(verb)


def test_deploying_without_a_server_is_refused(tmp_path: Any) -> None:
    done = lazytrain("deploy", "process", cwd=tmp_path)
    assert done.returncode == 2
    assert "PREFECT_API_URL" in done.stderr


def test_deploying_to_a_server_that_does_not_answer_may_be_tried_again(tmp_path: Any) -> None:
    where = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = lazytrain("deploy", "process", cwd=tmp_path, **where)
    assert done.returncode == 3
    assert "refused" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_deploying_with_a_wrong_schedule_is_refused_with_what_prefect_said(prefect: Prefect, tmp_path: Any) -> None:
    done = lazytrain("deploy", "process", "--cron", "at night", cwd=tmp_path, **prefect.client_environment)
    assert done.returncode == 2
    assert "cron" in done.stderr.lower()


@pytest.fixture(scope="module")
def deployed(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All three kinds, deployed on a real server; the deployments by name."""
    folder = tmp_path_factory.mktemp("deploys")
    for kind in KINDS:
        options = ("--stages", "docker", "--cron", "30 1 * * 1-5") if kind == "docker" else ()
        done = lazytrain("deploy", kind, *options, cwd=folder, **prefect.client_environment, **WORDS)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("deployment ") == len(NAMES), done.stdout
    with prefect.client() as client:
        return {f"{name}/{kind}": client.read_deployment_by_name(f"{name}/{kind}") for name in NAMES for kind in KINDS}


@pytest.mark.slow
def test_no_path_of_this_machine_reaches_a_container(deployed: dict[str, Any]) -> None:
    for name, deployment in deployed.items():
        ((step, given),) = (item for step in deployment.pull_steps for item in step.items())
        assert step == "prefect.deployments.steps.set_working_directory"
        assert given["directory"] == (str(ROOT) if name.endswith("/process") else "/app")
        assert deployment.path in (None, ".") or name.endswith("/process")
        assert deployment.enforce_parameter_schema


@pytest.mark.slow
def test_what_was_asked_for_at_deploying_is_there(deployed: dict[str, Any]) -> None:
    assert deployed["pipeline/docker"].parameters["stages"] == "docker"
    assert deployed["pipeline/docker"].schedules[0].schedule.cron == "30 1 * * 1-5"
    assert deployed["pipeline/kubernetes"].schedules[0].schedule.cron == "0 2 * * *"
    assert "stages" not in deployed["score/docker"].parameters


@pytest.mark.slow
def test_deploying_again_leaves_a_schedule_that_was_changed_and_paused_as_it_is(
    prefect: Prefect, deployed: dict[str, Any], tmp_path: Any
) -> None:
    known = deployed["pipeline/docker"]
    with prefect.client() as client:
        client.update_deployment_schedule(known.id, known.schedules[0].id, active=False)
    done = lazytrain("deploy", "docker", cwd=tmp_path, **prefect.client_environment, **WORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    with prefect.client() as client:
        (schedule,) = client.read_deployment(known.id).schedules
    assert (schedule.schedule.cron, schedule.active) == ("30 1 * * 1-5", False)


@pytest.mark.slow
def test_parameters_are_forms_with_descriptions_bounds_and_choices(deployed: dict[str, Any]) -> None:
    form = deployed["pipeline/process"].parameter_openapi_schema
    assert form["properties"]["stages"]["enum"] == ["in_process", "process", "docker", "kubernetes"]
    for deployment in deployed.values():
        form = deployment.parameter_openapi_schema
        assert all(item.get("description") for item in form["properties"].values()), deployment.name
    models = deployed["select/docker"].parameter_openapi_schema["definitions"]
    fraction = models["SelectConfig"]["properties"]["fraction"]
    assert fraction["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert fraction["description"] == "Of the pool's rows."
    assert models["StageOrder"]["properties"]["round"]["anyOf"][0]["minimum"] == 1
    assert set(models["SelectSettings"]["properties"]) == {"seed", "select", "train"}
    choices = deployed["ingest/process"].parameter_openapi_schema["definitions"]["IngestConfig"]["properties"]
    assert choices["truncation"]["enum"] == ["answer_end", "prompt_start", "quarantine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("select/docker", {"settings": {"select": {"fraction": 2}}}),
        ("select/docker", {"settings": {"govern": {}}}),
        ("score/kubernetes", {"order": {"round": 0}}),
        ("pipeline/process", {"stages": "cloud"}),
        ("pipeline/process", {"config_file": ""}),
    ],
)
def test_the_server_refuses_what_the_form_would_not_take(
    prefect: Prefect, deployed: dict[str, Any], name: str, parameters: dict[str, Any]
) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    with prefect.client() as client, pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(deployed[name].id, parameters=parameters)


@pytest.mark.slow
def test_a_container_gets_mlflow_s_credentials_from_secrets_that_the_api_does_not_show(
    prefect: Prefect, deployed: dict[str, Any]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect_docker.worker import DockerWorkerJobConfiguration

    with prefect.client() as client:
        pool = client.read_work_pool("lazytrain-docker")
        assert WORDS["MLFLOW_TRACKING_PASSWORD"] not in pool.model_dump_json()
        assert deployed["score/docker"].work_pool_name == pool.name
        block = client.read_block_document_by_name(
            block_name("MLFLOW_TRACKING_PASSWORD"), "secret", include_secrets=False
        )
        assert WORDS["MLFLOW_TRACKING_PASSWORD"] not in block.model_dump_json()

        async def configured() -> Any:
            async with get_client() as asked:
                return await DockerWorkerJobConfiguration.from_template_and_values(
                    pool.base_job_template, {}, client=asked
                )

        made = asyncio.run(configured())
    assert {name: made.env[name] for name in WORDS} == WORDS
    assert made.container_create_kwargs["read_only"] is True
    assert made.volumes == ["lazytrain-data:/data"]
