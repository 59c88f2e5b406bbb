"""The pipeline on a real small model and real instructions: to a verdict, reused, edited, and one stage again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from base64 import b64decode

import psutil
import pytest

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.records import Decision, Verdict
from flows.readable import text
from stages.stage import VERBS
from tests.command import ROOT, lazytrain
from tests.flows.small_run import Runs, lay_out
from tests.stages.select.test_view import Page

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.timeout(900)]


SECRET = "a-secret-of-the-environment"
SECRETS = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "WANDB_API_KEY")


@pytest.fixture(scope="module")
def first(tmp_path_factory, shared):
    """The folder of a run that has been made once; what the command printed."""
    folder = tmp_path_factory.mktemp("small")
    lay_out(folder, shared, data={"retention": "retention.jsonl"}, govern={"most_forgotten_nats": 5.0})
    rows = ({"prompt": f"Say {number}.", "completion": f"It is {number}."} for number in range(6))
    (folder / "retention.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    runs = Runs(folder, dict.fromkeys(SECRETS, SECRET))
    return runs, runs.run("run")


def cached(runs: Runs) -> dict[str, bool]:
    """Return, of the newest run, name of each call → whether it was reused."""
    return {row.name: row.cached for row in runs.attempts()}


def test_a_run_ends_in_a_verdict_on_measured_losses(first):
    runs, printed = first
    rows = {row.name: row for row in runs.attempts()}
    assert {row.stage for row in rows.values()} == set(VERBS) - {"weigh", "mix", "quote"}, (
        "no ways of choosing are tried, no parts mixed"
    )
    verdict = runs.store.record(rows["judge"].refs["verdict"], Verdict)
    assert verdict.outcome in ("promote", "hold", "reject")
    evaluation = rows["evaluate"].refs["evaluation"]
    assert evaluation.rows == 2 * 24, "base and candidate on 24 holdout items"
    for word in ("Decisions", "FLOPs", "peak memory", "verdict", "interval of the difference", "lazytrain status"):
        assert word in printed
    decision = runs.store.record(rows["govern-round-1"].refs["decision"], Decision)
    assert verdict.candidate == decision.best


def test_no_secret_of_the_environment_stands_in_anything_that_a_run_leaves(first):
    runs, printed = first
    assert SECRET not in printed
    files = [path for path in runs.folder.rglob("*") if path.is_file()]
    assert {"mlflow.db", "prefect.db", "manifest.json"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_calls_of_the_loop_are_named_for_stage_and_round(first):
    names = [row.name for row in first[0].attempts()]
    assert names == [
        *("ingest", "plan", "begin", "govern"),
        *("plan-round-1", "score-round-1", "select-round-1", "train-round-1", "govern-round-1"),
        *("evaluate", "judge", "promote"),
    ]


SHOWN = """
import json, sys
from pathlib import Path
from flows.environment import prepare
prepare(Path(sys.argv[1]))
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
tasks, parameters = {}, {}
with get_client(sync_client=True) as client:
    for flow in sorted(client.read_flow_runs(), key=lambda run: run.start_time)[-2:]:
        name = flow.name.partition("-/")[0]
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow.id]}))
        tasks[name] = {run.name: run.state.name for run in found}
        parameters[name] = flow.parameters
    made = sorted(client.read_artifacts(), key=lambda item: item.created)
    pages = {item.key: item.data for item in made}  # the latest of each
print(json.dumps({"tasks": tasks, "pages": pages, "parameters": parameters}))
"""


def test_prefect_shows_a_task_a_call_inside_its_round_and_artifacts_for_plan_decision_verdict(first):
    runs, _ = first
    runs.run("run")
    assert all(reused for name, reused in cached(runs).items() if name != "promote"), cached(runs)
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, str(runs.folder / ".lazytrain")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    whole, turn = shown["tasks"]["pipeline"], shown["tasks"]["round-1"]
    assert set(whole) == {"ingest", "plan", "begin", "govern", "round-0", "evaluate", "judge", "promote"}
    assert set(turn) == {f"{verb}-round-1" for verb in ("plan", "score", "select", "train", "govern")}
    reused = [state for name, state in (whole | turn).items() if name not in ("round-0", "promote")]
    assert set(reused) == {"Cached"}
    assert whole["promote"] == whole["round-0"] == "Completed"
    pages = shown["pages"]
    assert {"small-plan", "small-govern", "small-judge"} <= set(pages)
    store, attempts = runs.store, {row.name: row for row in runs.attempts()}
    ref = attempts["govern-round-1"].refs["decision"]
    decision, page = store.record(ref, Decision), pages["small-govern"].splitlines()
    assert page[0] == f"# govern: {decision.action}"
    (picture,) = [line for line in page if line.startswith("![")]
    drawn = b64decode(picture.partition("base64,")[2].rstrip(")"))
    assert drawn == (store.open(ref) / "measured" / "govern.png").read_bytes()
    causes = store.read_manifest(attempts["govern-round-1"].run).summary.tables[-1]
    assert page[page.index("## FLOPs by cause") + 4].split(" | ")[1] == text(causes.rows[0][1])
    assert {"## Segments", "## Fitted curve", "## Marginal gain", "## Decisions"} <= set(page)
    (line,) = [line for line in page if line.startswith("| after segment 1,")]
    assert line.endswith(f"| {decision.action} | {decision.reason} |")
    assert len(json.dumps(shown["parameters"]["pipeline"])) < 10_000
    assert shown["parameters"]["round-1"] == {"number": 1}


def test_a_run_that_reuses_everything_loads_neither_torch_nor_ray(first):
    code = (
        "import sys, json\nfrom flows.command.run import execute\n"
        "outcome = execute('lazytrain.yaml')\n"
        "print(json.dumps([outcome.reused, len(outcome.steps), 'torch' in sys.modules, 'ray' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=first[0].folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [11, 12, False, False]


def test_editing_one_stage_runs_it_and_those_after_it_and_nothing_before_it(first):
    runs, _ = first
    runs.edit("judge", gates=[{"method": "better_than_base"}])
    runs.run("run")
    ran = [name for name, reused in cached(runs).items() if not reused]
    assert ran == ["judge", "promote"]
    runs.edit("select", fraction=0.3)
    runs.run("run")
    ran = [name for name, reused in cached(runs).items() if not reused]
    assert ran == ["select-round-1", "train-round-1", "govern-round-1", "evaluate", "judge", "promote"]


def test_the_page_of_a_selection_shows_texts_of_the_pool_and_of_the_target(first):
    store = first[0].store
    (select,) = [row for row in store.attempts(store.runs()[-1].run) if row.name == "select-round-1"]
    page = (store.open(select.refs["selection"]) / "measured" / "selection.html").read_text(encoding="utf-8")
    assert "<h2>Map of texts</h2>" in page
    assert '"name":"target"' in page


def test_the_page_of_the_last_decision_draws_every_evaluation_and_decision_of_the_run(first):
    store = first[0].store
    attempts = {row.name: row for row in store.attempts(store.runs()[-1].run)}
    measured = store.open(attempts["govern-round-1"].refs["decision"]) / "measured"
    assert (measured / "govern.png").read_bytes().startswith(b"\x89PNG")
    figure = Page(measured / "govern.html").figures()[0]
    drawn = {trace["name"]: trace["y"] for trace in figure["data"]}
    for segment, (name, action) in enumerate((("begin", "warmup"), ("train-round-1", "reselect"))):
        curve = read_table(store.open(attempts[name].refs["curve"]) / TABLE_FILE)
        losses = [loss for loss in curve.column("validation_loss").to_pylist() if loss is not None]
        assert drawn[f"segment {segment}: {action}"] == losses
    assert len(drawn["decisions"]) >= 2


def test_every_segment_is_read_on_what_must_not_be_forgotten_against_the_loss_before_training(first):
    store = first[0].store
    run = store.runs()[-1].run
    attempts = {row.name: row for row in store.attempts(run)}
    begun, trained = attempts["begin"], attempts["train-round-1"]
    inputs = store.find_attempt(run, "train-round-1").inputs
    assert inputs["retention_tokens"] == (attempts["ingest"].refs["retention_tokens"],)
    assert inputs["retention_reference"] == (begun.refs["retention_losses"],)
    curves = [read_table(store.open(row.refs["curve"]) / TABLE_FILE).to_pylist() for row in (begun, trained)]
    for row in (*curves[0], *curves[1]):
        assert (row["retention_loss"] is None) == (row["validation_loss"] is None)
    last = [row for row in curves[1] if row["retention_loss"] is not None][-1]
    decision = store.record(attempts["govern-round-1"].refs["decision"], Decision)
    assert decision.numbers["retention_began"] == curves[0][0]["retention_loss"]
    assert decision.numbers["retention_rise"] == last["retention_loss"] - curves[0][0]["retention_loss"]
    assert decision.numbers["retention_rise_se"] == last["retention_rise_se"] > 0
    assert decision.numbers["most_forgotten_nats"] == 5.0


def test_the_gates_on_plain_folders_say_what_the_run_said(first, tmp_path):
    runs, _ = first
    store, oldest = runs.store, runs.store.runs()[-1].run
    rows = {row.name: row for row in store.attempts(oldest)}
    inputs = store.find_attempt(oldest, "judge").inputs
    arguments = [
        word
        for name in ("evaluation", "candidate", "selection", "pool", "target", "holdout")
        for ref in inputs[name]
        for word in (f"--{name}", str(store.open(ref)))
    ]
    committed = store.record(rows["judge"].refs["verdict"], Verdict)
    done = lazytrain("judge", *arguments, cwd=tmp_path)
    assert done.returncode == (0 if committed.outcome == "promote" else 2), done.stderr
    assert committed.reason in done.stdout.replace("\n", " ")


def test_one_stage_again_on_a_past_run_leaves_that_run_untouched(first):
    runs, _ = first
    past = runs.store.runs()[-1]
    before = runs.store.attempts(past.run)
    printed = runs.run("stage", "evaluate", "--run", past.run[:12])
    assert f"run {past.run} is as it was" in printed
    assert runs.store.attempts(past.run) == before
    (again,) = runs.attempts()
    assert again.stage == "evaluate"
    assert not again.cached
    evaluated = next(row for row in before if row.stage == "evaluate")
    assert again.run != evaluated.run
    assert again.refs["evaluation"].digest == evaluated.refs["evaluation"].digest


def test_status_tells_runs_costs_decisions_and_the_verdict(first):
    printed = first[0].run("status")
    for word in ("Runs", "finished", "evaluate"):
        assert word in printed
    oldest = first[0].store.runs()[-1].run
    printed = first[0].run("status", "--run", oldest)
    for word in ("decision", "verdict", "promotion", "score-round-1", "FLOPs"):
        assert word in printed


def test_a_stage_that_a_past_run_did_not_reach_is_refused(first):
    newest = first[0].newest()
    done = lazytrain("stage", "score", "--run", newest, "--round", "7", cwd=first[0].folder)
    assert done.returncode == 2
    assert "score-round-7" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_ended_says_so_everywhere_and_leaves_no_server_behind(tmp_path, shared, number, code):
    lay_out(tmp_path, shared)
    child = subprocess.Popen(
        [sys.executable, "-m", "flows.command.app", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    runs, until = Runs(tmp_path), time.monotonic() + 240
    while not any((tmp_path / ".lazytrain" / "work").glob("*/claim-*/scratch")):  # the first stage computes
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.2)
    below = psutil.Process(child.pid).children(recursive=True)
    assert below, "an embedded server"
    os.killpg(child.pid, number)  # as a terminal does
    _, said = child.communicate(timeout=120)
    assert child.returncode == code, said
    assert "what was committed is kept" in said
    assert runs.store.runs()[0].status == "KILLED"
    assert {row.status for row in runs.attempts()} <= {"KILLED", "FINISHED"}
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    with sqlite3.connect(tmp_path / ".lazytrain" / "prefect" / "prefect.db") as database:
        states = {state for (state,) in database.execute("select state_type from flow_run")}
    assert states == {"CRASHED"}, "the server outlived the signal and was told"
