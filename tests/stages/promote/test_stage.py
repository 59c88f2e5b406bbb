"""The promote stage against a real registry in SQLite."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from data_contracts.canonical import digest_of
from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import Finding, ModelPin, Promotion, Ref, StoreAddress, Verdict
from data_contracts.store import Store
from stages.promote.stage import STAGE, PromoteSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of

PIN = ModelPin(
    source="Someone/tiny",
    locator="hub:Someone/tiny@abc",
    digest="b" * 64,
    architecture="LlamaForCausalLM",
    parameters=1,
    layers=1,
    hidden=1,
    vocabulary=1,
    tied_embeddings=True,
    longest=8,
    tokenizer_digest="t" * 64,
    files=(),
)


pytestmark = pytest.mark.slow  # a fresh MLflow database


class RegisteredWork(LocalWork):
    """A local work with the registry of a real store."""

    store: Store

    def registry(self):
        return self.store.registry()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    home = tmp_path_factory.mktemp("store")
    address = StoreAddress(
        tracking_uri=f"sqlite:///{home}/mlflow.db", work_uri=str(home / "work"), artifact_uri=str(home / "artifacts")
    )
    return Store(address)


@pytest.fixture(scope="module")
def run(store):
    return store.open_run("made", {})


def checkpoint(tmp_path, run, letter):
    return Artifact(Ref(contract="checkpoint/1", run=run, path="checkpoint", digest=letter * 64), tmp_path)


def verdict(candidate, *, outcome="promote", champion=None):
    return Verdict(
        outcome=outcome,
        reason="holdout loss 3 → 2" if outcome == "promote" else "the base model was not improved: 3 → 3",
        candidate=candidate.ref.digest,
        champion=champion,
        findings=(Finding(gate="better_than_base", passed=outcome == "promote", reason="a | b"),),
        numbers={"holdout_loss_before": 3.0, "holdout_loss_after": 2.0, "selection_0_digest": "5" * 64},
    )


def promote(store, tmp_path, name, said, candidate, *, model="m"):
    work = RegisteredWork(
        tmp_path / name,
        {"promotion": "promotion", "verdict": "verdict", "base": "base", "evaluation": "evaluation"},
        ledger=Ledger.fold([Entry("i", "r", "train", {"train": Cost(flops=123, seconds=1)})]),
    )
    work.store = store
    work.record("verdict", said)
    work.record("base", PIN)
    columns = ("suite", "model", "item_id", "source", "score", "loss_sum", "answer_tokens", "prediction", "extracted")
    work.table("evaluation", {name: [] for name in (*columns, "log_likelihoods", "note")})
    inputs = inputs_of(
        verdict=work.artifact("verdict"),
        base=work.artifact("base"),
        evaluation=work.artifact("evaluation"),
        candidate=candidate,
    )
    STAGE.run(PromoteSlice(promote={"registered_model": model}), inputs, work)
    card = (work.home / "outputs" / "promotion" / "measured" / "card.md").read_text()
    return work.artifact("promotion").record(Promotion), card


def test_a_promoted_candidate_is_what_the_alias_names_once(store, run, tmp_path):
    candidate = checkpoint(tmp_path, run, "1")
    said = verdict(candidate)
    first, _ = promote(store, tmp_path, "a", said, candidate, model="once")
    again, _ = promote(store, tmp_path, "b", said, candidate, model="once")
    assert (first.outcome, first.version, first.previous_version) == ("promoted", 1, None)
    assert (again.outcome, again.version) == ("promoted", 1)
    assert first.decision_digest == digest_of(said.model_dump(mode="json"))
    assert store.registry().current("once", "champion").checkpoint == candidate.ref


@pytest.mark.parametrize(("outcome", "said"), [("hold", "held"), ("reject", "rejected")])
def test_nothing_moves_unless_the_verdict_is_promote(store, run, tmp_path, outcome, said):
    candidate = checkpoint(tmp_path, run, "2")
    found, card = promote(store, tmp_path, "a", verdict(candidate, outcome=outcome), candidate, model=f"no-{outcome}")
    assert (found.outcome, found.version) == (said, None)
    assert "the base model was not improved" in found.reason
    assert store.registry().current(f"no-{outcome}", "champion") is None
    assert f"**{outcome}**" in card


def test_an_alias_that_moved_since_the_verdict_stays(store, run, tmp_path):
    one, two, three = (checkpoint(tmp_path, run, letter) for letter in "345")
    promote(store, tmp_path, "a", verdict(one), one, model="moved")
    second, _ = promote(store, tmp_path, "b", verdict(two, champion=one.ref.digest), two, model="moved")
    assert (second.outcome, second.version, second.previous_version) == ("promoted", 2, 1)
    late, _ = promote(store, tmp_path, "c", verdict(three, champion=one.ref.digest), three, model="moved")
    assert (late.outcome, late.previous_version) == ("held", 2)
    unset, _ = promote(store, tmp_path, "d", verdict(three), three, model="moved")
    assert unset.outcome == "held"
    assert store.registry().current("moved", "champion").checkpoint == two.ref


def test_the_card_is_a_hub_card_with_every_digest(store, run, tmp_path):
    candidate = checkpoint(tmp_path, run, "6")
    said = verdict(candidate)
    found, text = promote(store, tmp_path, "a", said, candidate, model="card")
    card = ModelCard(text)
    assert card.data.base_model == "Someone/tiny"
    assert card.data.tags == ["lazytrain"]
    for digest in ("b" * 64, "t" * 64, "6" * 64, "5" * 64, found.decision_digest):
        assert digest in text
    assert "| train | 123 |" in text
    assert "a \\| b" in text


def test_a_verdict_about_another_candidate_is_refused(store, run, tmp_path):
    with pytest.raises(ArtifactError, match="judged"):
        promote(store, tmp_path, "a", verdict(checkpoint(tmp_path, run, "7")), checkpoint(tmp_path, run, "8"))
