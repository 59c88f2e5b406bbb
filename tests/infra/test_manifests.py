"""The files of `infra/` are what their own tools take: compose, Kubernetes, Prefect; and they hold no secret."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_contracts.errors import ConfigError
from flows import automations, pools
from tests.conftest import ROOT

INFRA = ROOT / "infra"
NEEDED = re.findall(r"^([A-Z_]+)=$", (INFRA / ".env.example").read_text(), flags=re.M)


def tool(name: str) -> str:
    """Return a program that the tests' packages bring."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is in the `tests` extra"
    return found


def compose(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run compose on our file with nothing but the given variables."""
    command = [tool("docker-compose"), "--env-file", "/dev/null", "-f", str(INFRA / "compose.yaml"), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **given}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose("config", "--format", "json", **dict.fromkeys(NEEDED, "given"))
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)["services"]
    return made


def test_compose_takes_the_file_and_it_holds_the_whole_team(services: dict[str, Any]) -> None:
    assert set(services) == {"postgres", "prefect", "mlflow", "ray-head", "ray-worker", "deploy", "docker-worker"}
    assert services["ray-worker"]["deploy"]["replicas"] == 2
    assert {"--app-name", "basic-auth", "--serve-artifacts"} <= set(services["mlflow"]["command"])


@pytest.mark.parametrize("name", NEEDED)
def test_nothing_starts_while_a_secret_is_missing(name: str) -> None:
    done = compose("config", "-q", **{other: "given" for other in NEEDED if other != name})
    assert done.returncode != 0
    assert name in done.stderr


def test_every_port_is_on_loopback_and_authentication_is_on(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert services["prefect"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"] == "given"
    assert services["ray-head"]["environment"]["RAY_AUTH_MODE"] == "token"
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"] == "given"


def test_services_of_ours_run_without_rights_on_a_read_only_root(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name != "postgres":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert not service.get("privileged", False)


def test_no_secret_reaches_a_command_line(services: dict[str, Any]) -> None:
    done = compose("config", "--format", "json", **{name: f"secret-{name}" for name in NEEDED})
    for service in json.loads(done.stdout)["services"].values():
        assert "secret-" not in json.dumps(service.get("command")).replace("secret-DOCKER", "")


def test_filled_in_secrets_are_neither_committed_nor_mounted(services: dict[str, Any]) -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    sources = [Path(volume["source"]) for service in services.values() for volume in service.get("volumes", [])]
    assert not [source for source in sources if (INFRA / ".env").is_relative_to(source)]


def test_the_docker_pool_mounts_and_joins_what_compose_makes(services: dict[str, Any]) -> None:
    pool = yaml.safe_load((INFRA / "work_pools" / "docker.yaml").read_text())["defaults"]
    file = yaml.safe_load((INFRA / "compose.yaml").read_text())
    assert pool["networks"] == [file["networks"]["lazytrain"]["name"]]
    assert pool["volumes"] == [f"{file['volumes']['lazytrain-data']['name']}:/data"]
    assert pool["image"] == services["docker-worker"]["image"]


def default_template(kind: str) -> dict[str, Any]:
    """Return Prefect's own template, as it is packed with Prefect: no server is asked."""
    import prefect

    path = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    found = [worker for group in json.loads(path.read_text()).values() for worker in group.values()]
    template: dict[str, Any] = next(item for item in found if item["type"] == kind)["default_base_job_configuration"]
    return template


def resolved(kind: pools.Kind) -> dict[str, Any]:
    """Return the configuration of a flow run on our pool, by Prefect's own reading of the template."""
    from prefect.utilities.templating import apply_values

    template = pools.template(kind, default_template(kind))
    defaults = {
        name: item["default"] for name, item in template["variables"]["properties"].items() if "default" in item
    }
    values = {**defaults, "labels": {"app": "lazytrain"}, "name": "run", "command": ["prefect", "flow-run", "execute"]}
    made: dict[str, Any] = apply_values(template["job_configuration"], values)
    return made


@pytest.mark.parametrize("kind", pools.KINDS)
def test_a_pool_s_template_is_one_that_prefect_takes_and_its_defaults_keep_the_template_s_schema(
    kind: pools.Kind,
) -> None:
    from jsonschema import Draft202012Validator
    from prefect.client.schemas.actions import WorkPoolCreate

    template = pools.template(kind, default_template(kind))
    WorkPoolCreate(name="x", type=kind, base_job_template=template)
    schema = template["variables"]
    Draft202012Validator.check_schema(schema)
    defaults = {name: item["default"] for name, item in schema["properties"].items() if "default" in item}
    Draft202012Validator(schema).validate(defaults)
    frequency = defaults["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
    assert int(frequency) == automations.HEARTBEAT_SECONDS
    assert automations.SILENT_SECONDS >= 3 * automations.HEARTBEAT_SECONDS
    assert str(ROOT) not in json.dumps(template)


def test_a_default_that_prefect_has_no_variable_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "process.yaml").write_text("type: process\ndefaults: {imgae: x}\n")
    monkeypatch.setattr(pools, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="imgae"):
        pools.template("process", default_template("process"))


def strictly(document: dict[str, Any]) -> None:
    """Put a Kubernetes object through kubernetes-validate."""
    import kubernetes_validate

    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_flow_run_s_kubernetes_job_is_valid_and_without_rights() -> None:
    manifest = resolved("kubernetes")["job_manifest"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [
        {"name": name, "value": value} for name, value in container["env"].items()
    ]  # as the worker does
    strictly(manifest)
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 3600
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    with pytest.raises(Exception, match="backoffLimits"):
        strictly({**manifest, "spec": {**manifest["spec"], "backoffLimits": 1}})


def templates(value: Any) -> list[dict[str, Any]]:
    """Return the pod templates anywhere in a custom resource."""
    if isinstance(value, list):
        return [found for item in value for found in templates(item)]
    if not isinstance(value, dict):
        return []
    own = [item for key, item in value.items() if key in {"template", "submitterPodTemplate"}]
    return own + [found for item in value.values() for found in templates(item)]


@pytest.mark.parametrize(("file", "pods"), [("cluster.yaml", 2), ("job.yaml", 3)])
def test_every_pod_of_the_ray_resources_is_valid_and_without_rights(file: str, pods: int) -> None:
    found = templates(yaml.safe_load((INFRA / "kuberay" / file).read_text()))
    assert len(found) == pods
    for template in found:
        strictly({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template})
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert (
                container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] or pods == 3
            )


def test_a_ray_job_leaves_nothing_behind_and_waits_for_nothing_for_ever() -> None:
    spec = yaml.safe_load((INFRA / "kuberay" / "job.yaml").read_text())["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    for name in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit"):
        assert isinstance(spec[name], int), name
    assert spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]


def test_the_ray_version_is_the_locked_one() -> None:
    locked = re.search(r"^ray(?:\[[^]]*\])?==(\S+)", (ROOT / "requirements.lock").read_text(), flags=re.M)
    assert locked is not None
    cluster = yaml.safe_load((INFRA / "kuberay" / "cluster.yaml").read_text())
    job = yaml.safe_load((INFRA / "kuberay" / "job.yaml").read_text())
    assert {cluster["spec"]["rayVersion"], job["spec"]["rayClusterSpec"]["rayVersion"]} == {locked[1]}
