"""Does the noise audit find wrong answers? One in ten answers of real rows is given to another row's question.

A small instruction-tuned model reads GSM8K rows of which a tenth have each other's answers, and trains on them for one
epoch with LoRA: the audit sees what a user's pool would show it. Two statistics rank the rows, both by the product's
own scorers from that checkpoint: the mean answer-token loss (`mislabel_auc`: what the audit beside every scorer that
knows losses lists by) and self-influence (`mislabel_auc_self_influence`: the norm of the row's own gradient, an answer
token's, that `grand` lists by). The noise filter `answer_fit` reads the same rows without a model
(`mislabel_auc_answer_fit`). A figure is the area under the ROC curve, with an interval from Hanley and McNeil's
standard error.

    python -m benchmarks.noise_audit [--quick] [--data FOLDER] [--model FOLDER]
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.stats import rankdata

from benchmarks.chain import report
from benchmarks.options import Options
from data_contracts.tables import TOKENS

if TYPE_CHECKING:
    from stages.model.batch import Row

SHARE, LONGEST, RATE, WINDOW = 0.1, 112, 3e-4, 8


def rows_of(data: Path, tokenizer: Any, count: int) -> tuple[list[Row], np.ndarray]:
    """Return `count` short rows drawn by a fixed seed, a tenth of them with another's answer, and which those are."""
    from stages.model.batch import Row

    with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    pairs: list[tuple[list[int], list[int]]] = []
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        question = tokenizer(texts[index]["question"] + "\n")["input_ids"]
        answer = tokenizer(texts[index]["answer"], add_special_tokens=False)["input_ids"]
        if len(question) + len(answer) <= LONGEST:
            pairs.append((question, answer))
        if len(pairs) == count:
            break
    wrong = np.random.default_rng(5).choice(len(pairs), int(SHARE * len(pairs)), replace=False)
    answers = [answer for _, answer in pairs]
    for row, giver in zip(wrong.tolist(), np.roll(wrong, 1).tolist(), strict=True):
        answers[row] = pairs[giver][1]
    rows = []
    for index, ((question, _), answer) in enumerate(zip(pairs, answers, strict=True)):
        ids = np.array([*question, *answer])
        rows.append(Row(f"{index:06d}", ids, np.arange(len(ids)) >= len(question)))
    return rows, np.isin(np.arange(len(pairs)), wrong)


def trained_on(model: Any, rows: list[Row]) -> Any:
    """Train LoRA on the rows for one epoch and return the checkpoint."""
    import torch

    from data_contracts.config import TrainConfig
    from stages.model.batch import collate
    from stages.model.checkpoint import TrainedModel
    from stages.technique.methods.lora import Lora
    from stages.technique.step import optimizer_for, optimizer_step

    torch.manual_seed(0)
    adapted: Any = Lora(r=8, alpha=16.0).wrap(model)
    adapted.train()
    optimizer = optimizer_for(adapted, TrainConfig(), RATE)
    order = np.random.default_rng(1).permutation(len(rows))
    for at in range(0, len(order), WINDOW):
        batch = collate([rows[index] for index in order[at : at + WINDOW]])
        optimizer_step(adapted, optimizer, [batch], clip=1.0, precision="bfloat16")
    return TrainedModel(adapted.eval(), {}, {})


def answer_fit(rows: list[Row]) -> np.ndarray:
    """Return what the noise filter `answer_fit` makes of the rows: above 0 it drops one."""
    from stages.select.noise import Evidence
    from stages.select.noise_filters.answer_fit import AnswerFit

    columns: dict[str, Any] = {
        "example_id": [row.example_id for row in rows],
        "source": ["gsm8k"] * len(rows),
        "input_ids": [row.input_ids.tolist() for row in rows],
        "answer_mask": [row.answer_mask.tolist() for row in rows],
        "n_tokens": [len(row.input_ids) for row in rows],
        "n_answer_tokens": [int(row.answer_mask.sum()) for row in rows],
        "truncated": [False] * len(rows),
    }
    return AnswerFit().suspicion(Evidence(pa.table(columns, schema=TOKENS.schema)))


def area(value_N: np.ndarray, wrong_N: np.ndarray) -> tuple[float, list[float]]:
    """Return the area under the ROC curve and its 95 % interval (Hanley & McNeil 1982, equation 1)."""
    positive, negative = int(wrong_N.sum()), int((~wrong_N).sum())
    rank_sum = float(rankdata(value_N)[wrong_N].sum())
    auc = (rank_sum - positive * (positive + 1) / 2) / (positive * negative)
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (positive - 1) * (q1 - auc**2) + (negative - 1) * (q2 - auc**2)
    half = 1.96 * math.sqrt(variance / (positive * negative))
    return round(auc, 3), [round(max(0.0, auc - half), 3), round(min(1.0, auc + half), 3)]


def audit(data: Path, model: Path | None, *, quick: bool) -> dict[str, Any]:
    """Return the figures; none, and a line that says so, where the model is not on this machine."""
    from benchmarks.scorers import scores_of
    from data_contracts.config import ModelConfig
    from flows.command.model import SMALL, models_home
    from stages.model.load import load_model, load_tokenizer, pin_model

    folder = (model or models_home() / SMALL).resolve()
    if not folder.is_dir():
        print(f"no noise audit: {folder} is absent (`lazytrain model pull` brings it, or give a folder)")
        return {}
    pin = pin_model(ModelConfig(path=folder.name), folder.parent)
    rows, wrong_N = rows_of(data, load_tokenizer(pin), 80 if quick else 200)
    trained = trained_on(load_model(pin), rows)
    figures: dict[str, Any] = {"mislabelled": int(wrong_N.sum()), "audited": len(rows), "audit_model": folder.name}
    for name, method in (("mislabel_auc", "perplexity"), ("mislabel_auc_self_influence", "grand")):
        score_N = scores_of({"method": method}, trained, rows, (), batch_tokens=1024, bfloat16=True)[:, 0]
        figures[name], figures[f"{name}_interval"] = area(score_N, wrong_N)
    fit_N = answer_fit(rows)
    figures["mislabel_auc_answer_fit"], figures["mislabel_auc_answer_fit_interval"] = area(fit_N, wrong_N)
    figures["answer_fit_dropped"] = [round(float((fit_N[at] > 0).mean()), 3) for at in (wrong_N, ~wrong_N)]
    return figures


def main() -> None:
    """Run the audit alone."""
    parser = Options(__doc__, "fewer rows")
    parser.add_argument("--model", type=Path, default=None, help="folder of a model; default: the quick start's")
    options = parser.read()
    import torch

    torch.set_num_threads(1)
    report("noise_audit", audit(options.data, options.model, quick=options.quick))


if __name__ == "__main__":
    main()
