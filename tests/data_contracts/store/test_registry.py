"""An alias moves once, only off what was seen, to a version that names its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2

from data_contracts.errors import ArtifactError
from data_contracts.records import Origin, Ref
from data_contracts.store import Store, registry
from data_contracts.store.process import this_process
from tests.stores import blank


@dataclass
class Candidate:
    ref: Ref


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(blank(tmp_path))


def candidate(store: Store, digit: str) -> Candidate:
    run = store.open_attempt("train", digit * 64, Origin(), shared=True)
    return Candidate(Ref(contract="checkpoint/1", run=run, path="checkpoint", digest=digit * 64))


def promote(store: Store, made: Candidate, expected: str | None, attempt: str | None = None) -> registry.Version:
    return store.registry(attempt).promote("toy", "champion", made, "# Card", {"loss@holdout": "0.5"}, expected)


def test_an_alias_that_was_never_set_names_nothing(store: Store) -> None:
    assert store.registry().current("toy", "champion") is None


def test_a_promotion_registers_a_version_with_a_relative_source_and_moves_the_alias(store: Store) -> None:
    made = candidate(store, "a")
    attempt = store.open_attempt("promote", "f" * 64, Origin(), shared=False)
    version = promote(store, made, None, attempt)
    assert version == store.registry().current("toy", "champion")
    assert version.checkpoint == made.ref
    stored = store._tracking.do(lambda client: client.get_model_version("toy", str(version.version)))
    assert stored.source == f"runs:/{made.ref.run}/checkpoint"
    assert stored.description == "# Card"
    assert stored.tags["loss_u40_holdout"] == "0.5"
    assert store._backend(attempt).get("card.md") == b"# Card"


def test_the_same_checkpoint_is_the_same_version_however_often_it_is_promoted(store: Store) -> None:
    first, second = candidate(store, "a"), candidate(store, "b")
    one = promote(store, first, None)
    assert promote(store, first, None) == one, "a promotion that is tried again after a crash"
    two = promote(store, second, first.ref.digest)
    back = promote(store, first, second.ref.digest)
    assert (one.version, two.version, back.version) == (1, 2, 1)


def test_an_alias_that_names_something_else_is_left_alone(store: Store) -> None:
    first, second, third = (candidate(store, digit) for digit in "abc")
    promote(store, first, None)
    with pytest.raises(ArtifactError, match="names nothing, as the verdict"):
        promote(store, second, None)
    with pytest.raises(ArtifactError, match="nothing was moved"):
        promote(store, second, third.ref.digest)
    current = store.registry().current("toy", "champion")
    assert current is not None
    assert current.checkpoint == first.ref
    assert len(store._tracking.do(lambda client: client.search_model_versions("name = 'toy'"))) == 1


def test_of_two_promotions_that_saw_the_same_champion_one_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (candidate(store, digit) for digit in "abc")
    promote(store, first, None)
    slow, calls = store.registry(), list[str]()
    once = store._tracking.once

    def interleaved(run: str, key: str, value: str) -> str:
        if ".move." in key and not calls:
            calls.append(key)
            promote(store, third, first.ref.digest)  # between the look and the move of `second`
        return once(run, key, value)

    monkeypatch.setattr(store._tracking, "once", interleaved)
    with pytest.raises(ArtifactError, match="nothing was moved"):
        slow.promote("toy", "champion", second, "", {}, first.ref.digest)
    current = store.registry().current("toy", "champion")
    assert current is not None
    assert current.checkpoint == third.ref


def test_a_move_whose_winner_died_is_finished_by_the_next_caller(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = candidate(store, "a"), candidate(store, "b")
    dead = this_process().model_copy(update={"started": 0.0})
    with monkeypatch.context() as patch:
        patch.setattr(registry, "this_process", lambda: dead)
        patch.setattr(registry.ModelRegistry, "_register", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            promote(store, first, None)
    assert store.registry().current("toy", "champion") is None
    with pytest.raises(ArtifactError, match="nothing was moved"):
        promote(store, second, None)
    current = store.registry().current("toy", "champion")
    assert current is not None
    assert current.checkpoint == first.ref


def test_a_version_registered_by_other_means_is_not_taken_for_a_champion(store: Store) -> None:
    run = candidate(store, "a").ref.run

    def foreign(client: object) -> None:
        client.create_registered_model("toy")  # type: ignore[attr-defined]
        client.create_model_version("toy", source=f"runs:/{run}/x", run_id=run)  # type: ignore[attr-defined]
        client.set_registered_model_alias("toy", "champion", "1")  # type: ignore[attr-defined]

    store._tracking.do(foreign)
    with pytest.raises(ArtifactError, match="other means"):
        store.registry().current("toy", "champion")


def test_what_the_last_move_replaced_is_told(store: Store) -> None:
    first, second = candidate(store, "a"), candidate(store, "b")
    assert store.registry().replaced("toy", "champion") is None
    promote(store, first, None)
    assert store.registry().replaced("toy", "champion") is None
    promote(store, second, first.ref.digest)
    assert store.registry().replaced("toy", "champion") == first.ref
    promote(store, first, second.ref.digest)
    assert store.registry().replaced("toy", "champion") == second.ref


def test_a_model_that_is_made_while_it_is_asked_for_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = candidate(store, "a")
    version = promote(store, made, None)
    client = store._tracking._client
    real, asked = client.get_model_version_by_alias, list[str]()

    def before_it_was_made(name: str, alias: str) -> Any:
        asked.append(alias)
        if len(asked) == 1:  # a server with accounts denies what is not there
            raise MlflowException("Permission denied", error_code=databricks_pb2.PERMISSION_DENIED)
        return real(name, alias)

    monkeypatch.setattr(client, "get_model_version_by_alias", before_it_was_made)
    assert store.registry().current("toy", "champion") == version
    assert len(asked) == 2


def test_an_account_that_may_not_read_a_model_it_sees_is_told_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(store, candidate(store, "a"), None)

    def denied(name: str, alias: str) -> Any:
        raise MlflowException("Permission denied", error_code=databricks_pb2.PERMISSION_DENIED)

    monkeypatch.setattr(store._tracking._client, "get_model_version_by_alias", denied)
    with pytest.raises(MlflowException, match="denied"):
        store.registry().current("toy", "champion")
    assert store.registry().current("another", "champion") is None
