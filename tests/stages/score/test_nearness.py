"""Scorers that say how near an example is to the target: against a peer library, dictionaries and float64."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
import pytest
import torch

from data_contracts.errors import InputError
from stages.model.load import load_model
from stages.score.methods.dsir import DSIR
from stages.stage import Artifact
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import rows_of
from tests.stages.score.setting import Setting, make_setting, odd_row, tokens_of

ROOT = Path(__file__).parents[3]
WORDS = ["the", "sum", "of", "two", "primes", "is", "river", "song", "a", "blue", "over", "when"]


def sentences(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    share = random.dirichlet(np.full(len(WORDS), 0.5))
    return [" ".join(random.choice(WORDS, size=int(random.integers(4, 30)), p=share)) for _ in range(count)]


def examples_of(folder: Path, ids: Sequence[str], texts: Sequence[str]) -> Artifact:
    work = LocalWork(folder, {"e": "examples"})
    with work.writer("e") as writer:
        for index, (example_id, text) in enumerate(sorted(zip(ids, texts, strict=True))):
            empty = {"messages": "", "tools": "", "extra": "{}"}
            writer.append(
                {"example_id": example_id, "source": "s", "file": "f", "row": index + 1, "text": text, **empty}
            )
    return work.artifact("e")


def text_setting(folder: Path, pool: Sequence[str], target: Sequence[str]) -> Setting:
    setting = make_setting(folder)
    ids = {"pool": [f"p{i:03d}" for i in range(len(pool))], "target": [f"t{i:03d}" for i in range(len(target))]}
    for name, texts in (("pool", pool), ("target", target)):
        rows = [odd_row(example_id, [1, 2, 3], [False, True, True]) for example_id in ids[name]]
        sources = ["b" if index % 3 else "a" for index in range(len(rows))]
        setting.inputs[f"{name}_tokens"] = tokens_of(folder / f"{name} tokens", rows, sources)
        setting.inputs[name] = examples_of(folder / name, ids[name], texts)
    return setting


def columns(setting: Setting, name: str = "run", **scorer) -> np.ndarray:
    work, _ = setting.score(name, scorer=scorer, groups="source")
    return np.array([row["group_scores"] for row in work.rows("scores")])


GROUPS = [[0, 3], [1, 2, 4]]  # of five target rows, sources a and b


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.0)])
def test_bm25_is_the_mean_over_queries_of_what_bm25s_gives(tmp_path: Path, k1: float, b: float) -> None:
    pool, target = sentences(40, 1), sentences(5, 2)
    peer = bm25s.BM25(method="lucene", k1=k1, b=b, dtype="float64")
    peer.index([text.split() for text in pool], show_progress=False)
    each = np.array([peer.get_scores(text.split()) for text in target])
    expected = np.stack([each[members].mean(axis=0) for members in GROUPS], axis=1)
    found = columns(text_setting(tmp_path, pool, target), method="bm25", k1=k1, b=b)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("per", ["visit", "ngram"])
def test_dsir_is_the_log_ratio_of_n_gram_frequencies(tmp_path: Path, per: str) -> None:
    pool, target = sentences(40, 1), sentences(5, 2)

    def grams(text: str) -> Counter[tuple[str, ...]]:
        words = text.split()
        return Counter([*((w,) for w in words), *(tuple(words[i : i + 2]) for i in range(len(words) - 1))])

    def share(texts: Sequence[str], gram: tuple[str, ...]) -> float:
        counted = [grams(text) for text in texts]
        return sum(c[gram] for c in counted) / sum(sum(c.values()) for c in counted) + 1e-8

    every = {gram for text in pool for gram in grams(text)}
    scorer = DSIR(buckets=2**22)
    assert len({int(scorer.places(" ".join(gram))[-1]) for gram in every}) == len(every)  # no two share a bucket
    expected = np.zeros((len(pool), 2))
    for column, members in enumerate(GROUPS):
        rows = [target[member] for member in members]
        weight = {gram: np.log(share(rows, gram) / share(pool, gram)) for gram in every}
        for index, text in enumerate(pool):
            total = sum(count * weight[gram] for gram, count in grams(text).items())
            expected[index, column] = total / (1 if per == "visit" else sum(grams(text).values()))
    found = columns(text_setting(tmp_path, pool, target), method="dsir", buckets=2**22, per=per)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("method", ["bm25", "dsir"])
def test_case_and_punctuation_do_not_matter_and_a_row_without_words_is_refused(tmp_path: Path, method: str) -> None:
    pool, target = sentences(12, 1), sentences(5, 2)
    plain = columns(text_setting(tmp_path / "plain", pool, target), method=method)
    loud = [text.upper().replace(" ", ", ") + "!" for text in pool]
    np.testing.assert_array_equal(columns(text_setting(tmp_path / "loud", loud, target), method=method), plain)
    work, _ = text_setting(tmp_path / "empty", [*pool, "…?!"], target).score(scorer={"method": method})
    assert [row["example_id"] for row in work.rows("quarantine")] == ["p012"]
    with pytest.raises(InputError, match="hold words"):
        text_setting(tmp_path / "none", pool, ["?", "!"]).score(scorer={"method": method})


def test_a_scorer_of_texts_loads_no_torch(tmp_path: Path) -> None:
    setting = text_setting(tmp_path, sentences(12, 1), sentences(5, 2))
    folders = {name: str(artifact.folder) for name, artifact in setting.inputs.items()}
    code = f"""
import sys
from pathlib import Path
from data_contracts.config import ScoreConfig
from data_contracts.records import Ref
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for
ref = Ref(contract="x/1", run="", path="", digest="")
inputs = Inputs({{name: (Artifact(ref, Path(folder)),) for name, folder in {folders!r}.items()}})
for method in ("bm25", "dsir"):
    work = work_for(STAGE, Path({str(tmp_path / "light")!r}) / method)
    STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(scorer={{"method": method}})), inputs, work)
    assert len(work.rows("scores")) == 12
assert not {{"torch", "transformers", "peft"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def vectors(setting: Setting, seed: int, count: int, by_position: bool) -> np.ndarray:
    """Return each row's pooled hidden states at unit length, one row at a time in float64."""
    model = load_model(setting.pin).double()
    found = []
    for row in rows_of(count, seed=seed):
        ids = torch.from_numpy(row.input_ids)[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0].numpy()
        mean = np.average(hidden, axis=0, weights=np.arange(1, len(hidden) + 1) if by_position else None)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found)


@pytest.mark.parametrize(("method", "over"), [("embedding", "mean"), ("rds_plus", "max"), ("rds_plus", "mean")])
def test_cosines_are_those_of_vectors_made_one_row_at_a_time(tmp_path: Path, method: str, over: str) -> None:
    setting = make_setting(tmp_path)
    by_position = method == "rds_plus"
    pool, target = vectors(setting, 1, 24, by_position), vectors(setting, 2, 6, by_position)
    expected = []
    for members in ([1, 3, 4], [0, 2, 5]):  # sources a, b
        if method == "embedding":
            mean = target[members].mean(axis=0)
            expected.append(pool @ (mean / np.linalg.norm(mean)))
        else:
            cosines = pool @ target[members].T
            expected.append(cosines.max(axis=1) if over == "max" else cosines.mean(axis=1))
    settings = {"over": over} if method == "rds_plus" else {}
    np.testing.assert_allclose(columns(setting, method=method, **settings), np.stack(expected, axis=1), atol=1e-5)


def test_an_embedding_is_charged_a_forward_pass_without_the_output_head(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    work, _ = setting.score("e", scorer={"method": "embedding"}, batch_tokens=1)  # a row a batch: no padding
    rows = rows_of(24, seed=1) + rows_of(6, seed=2)
    layers = sum(p.numel() for n, p in load_model(setting.pin).named_parameters() if "layers" in n and p.dim() == 2)
    lengths = [len(row.input_ids) for row in rows]
    # two operations a weight and token, and attention's two products of T² · 16 in each of two layers; and the cosines
    passes = sum(2 * n * layers + 2 * 2 * 2 * n * n * 16 for n in lengths)
    assert work.ledger().total.flops == passes + 24 * 2 * 16
    assert work.ledger().total.tokens == sum(lengths)
