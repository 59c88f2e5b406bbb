"""Every stage works on plain files, and says on the screen what a reader must know."""

from __future__ import annotations

import json

import pytest

from tests.command import lazytrain

pytestmark = pytest.mark.shared


def case(shared, name):
    (found,) = (shared / "cases" / "files").glob(f"{name}-*")
    return found


def test_ingest_counts_and_lists_what_is_not_used(shared, tmp_path):
    done = lazytrain("ingest", "--pool", str(case(shared, "I03") / "pool.csv"), "--out", "made", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "7 of 8 rows kept" in done.stdout
    assert "not used: pool.csv line 10 output: empty_answer" in done.stdout
    assert (tmp_path / "made" / "pool" / "outputs" / "pool" / "data.arrow").is_file()


def test_a_pool_without_a_usable_row_is_refused(shared, tmp_path):
    done = lazytrain("ingest", "--pool", str(case(shared, "I05") / "all_bad.jsonl"), cwd=tmp_path)
    assert done.returncode == 2
    assert "no usable row: 0 of 1" in done.stderr
    assert "line 1" in done.stderr


def test_select_never_chooses_what_cannot_be_ranked(shared, tmp_path):
    scores = str(case(shared, "C03") / "scores.jsonl")
    done = lazytrain("select", "--scores", scores, "--budget", "5", "--out", "s.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["example_id"] for line in (tmp_path / "s.jsonl").read_text().splitlines()] == [
        "s1",
        "s6",
        "s3",
    ]
    assert "only 3 of 5 could be filled" in done.stdout


def test_evaluate_marks_predictions(shared, tmp_path):
    done = lazytrain("evaluate", "--predictions", str(case(shared, "E01") / "preds.jsonl"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean 0.5714 over 7 of 7 items" in done.stdout


def test_training_rows_that_meet_the_evaluation_end_with_exit_code_2(shared, tmp_path):
    files = case(shared, "E02")
    arguments = ["--eval", str(files / "eval.jsonl"), "--train", str(files / "selected.jsonl"), "--check-overlap"]
    done = lazytrain("evaluate", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "2 of 2 evaluation items affected" in done.stdout


def test_govern_keeps_the_best_and_stops(shared, tmp_path):
    done = lazytrain("govern", "--evals", str(case(shared, "G01") / "evals.jsonl"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kept: step 20, eval_loss 0.8" in done.stdout


def test_govern_ends_where_a_file_tells_of_more_forgotten_than_is_allowed(tmp_path):
    rises = {1: 0.0, 2: 0.1, 3: 0.3}
    rows = [{"step": step, "eval_loss": 1 / step, "retention_loss": 2 + rise} for step, rise in rises.items()]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = lazytrain("govern", "--evals", "evals.jsonl", "--most-forgotten", "0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stopped at step 3: what must not be forgotten is" in done.stdout
    assert "kept: step 2, eval_loss 0.5" in done.stdout


def test_a_metric_without_a_direction_is_refused(shared, tmp_path):
    evals = str(case(shared, "G02") / "evals.jsonl")
    done = lazytrain("govern", "--evals", evals, "--metric", "eval_quality", cwd=tmp_path)
    assert done.returncode == 2
    assert "minimise" in done.stderr


@pytest.mark.slow
def test_promote_stores_every_metric_under_a_name_of_its_own(shared, tmp_path):
    metrics = str(case(shared, "M01") / "metrics.json")
    done = lazytrain("promote", "--metrics", metrics, "--registry", "sqlite:///m.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("hits@1", "hits_at_1", "f1[macro]", "exact_match,none", "acc"):
        assert name in done.stdout


@pytest.mark.slow
def test_score_lists_the_row_whose_answer_was_cut_away(shared, tmp_path):
    files = case(shared, "S01")
    arguments = [
        "--pool",
        str(files / "pool.jsonl"),
        "--target",
        str(files / "target.jsonl"),
        "--model",
        str(files / "model"),
    ]
    done = lazytrain("score", *arguments, "--max-len", "32", "--out", "made", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "made" / "scores.jsonl").read_text().splitlines()]
    assert {row["id"] for row in rows} == {"x1", "x3"}
    assert "prompt is 65 tokens, limit 32" in done.stdout


@pytest.mark.slow
def test_plan_refuses_a_misspelt_target_and_counts_the_right_one(shared, tmp_path):
    files = case(shared, "P01")
    wrong = lazytrain("plan", "--model", str(files / "model"), "--config", str(files / "lora.json"), cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'v_proj'?" in wrong.stderr
    arguments = ["--model", str(files / "model"), "--config", str(files / "fixed.json"), "--max-len", "64"]
    right = lazytrain("plan", *arguments, cwd=tmp_path)
    assert right.returncode == 0, right.stderr
    assert "trainable_parameters         64" in right.stdout


@pytest.mark.slow
def test_train_refuses_to_make_no_step(shared, tmp_path):
    files = case(shared, "T02")
    arguments = ["--data", str(files / "selected.jsonl"), "--model", str(files / "model"), "--max-len", "64"]
    done = lazytrain("train", *arguments, "--config", str(files / "train.json"), cwd=tmp_path)
    assert done.returncode == 2
    assert "0 steps: 3 rows < 4 x 8 = 32 per step with drop_last" in done.stderr
    done = lazytrain(
        "train",
        *arguments,
        "--set",
        "train.learning_rate=0.01",
        "--set",
        "plan.window=2",
        "--out",
        "made",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "checkpoint" / "model.safetensors").is_file()


def test_an_unknown_key_of_a_settings_file_is_refused_with_the_nearest_name(shared, tmp_path):
    (tmp_path / "s.json").write_text('{"epoch": 1}')
    model = str(case(shared, "T02") / "model")
    done = lazytrain("plan", "--model", model, "--config", "s.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'epochs'?" in done.stderr
