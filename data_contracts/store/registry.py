"""The model registry: versions that name their checkpoint, and an alias that moves only off what was seen.

MLflow sets an alias unconditionally. Here each move is the next entry of a write-once log (param `move.<k>`), so that
of two promotions that saw the same champion one wins; a move whose winner died is finished by the next caller. A
version's source is `runs:/<run>/<path>`, never an absolute path, and its tags hold the reference of its checkpoint.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from data_contracts.cost import Frozen
from data_contracts.errors import ArtifactError
from data_contracts.records import Ref
from data_contracts.store.lease import Coordination
from data_contracts.store.names import legal
from data_contracts.store.process import Process, this_process

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKPOINT_TAG, DIGEST_TAG = "lazytrain.checkpoint", "lazytrain.digest"
PATIENCE_SECONDS = 30.0
_LONGEST_DESCRIPTION = 5000


class Referenced(Protocol):
    """Anything with the reference of a checkpoint."""

    @property
    def ref(self) -> Ref: ...


@dataclass(frozen=True)
class Version:
    """A version of a registered model and the checkpoint it was registered from."""

    version: int
    checkpoint: Ref


class Move(Frozen):
    """One entry of an alias's log: from which checkpoint (digest) to which."""

    before: str | None
    to: Ref
    tags: dict[str, str]
    holder: str
    process: Process


class ModelRegistry:
    """Versions and aliases; `log_card` stores the model card with the attempt that promotes."""

    def __init__(self, coordination: Coordination, log_card: Callable[[str], None] | None = None) -> None:
        self._coordination, self._log_card = coordination, log_card
        self._tracking = coordination.tracking

    def current(self, model: str, alias: str) -> Version | None:
        """Return what `alias` names now, or None. Raises `ArtifactError` for a version that was not made here."""
        found = self._alias(model, alias)
        return _version(found) if found is not None else None

    def replaced(self, model: str, alias: str) -> Ref | None:
        """Return the checkpoint that `alias` named before its last move, None where it named nothing or never moved."""
        log = self._coordination.shard("registry")
        params, key = self._tracking.params(log), _key(model, alias)
        moves = [text for number in range(1, len(params) + 1) if (text := params.get(f"{key}.move.{number}"))]
        if not moves:
            return None
        before = Move.model_validate_json(moves[-1]).before
        earlier = [Move.model_validate_json(text).to for text in moves[:-1]]
        return next((ref for ref in reversed(earlier) if ref.digest == before), None)

    def versions(self) -> list[Any]:
        """Return every version of every registered model, as MLflow tells them."""
        found: list[Any] = []
        token: str | None = None
        while True:
            page: Any = self._tracking.do(
                lambda client, token=token: client.search_model_versions(max_results=1000, page_token=token)  # type: ignore[misc]
            )
            found.extend(page)
            token = page.token
            if not token:
                return found

    def _alias(self, model: str, alias: str, *, seen: bool = False) -> Any:
        try:
            return self._tracking.do(lambda client: client.get_model_version_by_alias(model, alias))
        except Exception as error:
            code = getattr(error, "error_code", None)
            if code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            if code == "PERMISSION_DENIED" and not seen:  # what a server with accounts says of none, too
                return self._alias(model, alias, seen=True) if model in self._names() else None  # made meanwhile
            raise

    def _names(self) -> set[str]:
        """Return the names of the registered models that this account may see."""
        found, token = set[str](), None
        while True:
            page: Any = self._tracking.do(
                lambda client, token=token: client.search_registered_models(max_results=100, page_token=token)  # type: ignore[misc]
            )
            found.update(item.name for item in page)
            token = page.token
            if not token:
                return found

    def promote(
        self, model: str, alias: str, candidate: Referenced, card: str, tags: Mapping[str, str], expected: str | None
    ) -> Version:
        """Register `candidate` (the same checkpoint gives the same version) and move `alias` to it.

        Raises `ArtifactError` and moves nothing where `alias` does not name the checkpoint with digest `expected`
        (None: unset).
        """
        key = hashlib.sha256(f"{model}\0{alias}".encode()).hexdigest()
        log = self._coordination.shard("registry")
        done = self._finish(log, key, model, alias)
        now = self.current(model, alias)
        if now is not None and now.checkpoint.digest == candidate.ref.digest:
            return now
        found = now.checkpoint.digest if now else None
        if found != expected:
            raise _moved(model, alias, found, expected)
        move = Move(
            before=expected,
            to=candidate.ref,
            tags={legal(name): value for name, value in tags.items()},
            holder=uuid.uuid4().hex,
            process=this_process(),
        )
        held = Move.model_validate_json(self._tracking.once(log, f"{key}.move.{done + 1}", move.model_dump_json()))
        if held.to.digest != candidate.ref.digest:
            raise _moved(model, alias, held.to.digest, expected)
        self._finish(log, key, model, alias, move.holder, card)
        version = self.current(model, alias)
        if version is None or version.checkpoint.digest != candidate.ref.digest:
            raise _moved(model, alias, version.checkpoint.digest if version else None, expected)
        return version

    def _finish(self, log: str, key: str, model: str, alias: str, holder: str = "", card: str = "") -> int:
        """Carry out moves that were won but not done, and return the number of moves so far.

        A move of another live process is waited for; of a dead one it is carried out here, without its card.
        """
        number, until = 0, time.monotonic() + PATIENCE_SECONDS
        params = self._tracking.params(log)
        while (text := params.get(f"{key}.move.{number + 1}")) is not None:
            number += 1
            move = Move.model_validate_json(text)
            while f"{key}.done.{number}" not in params and move.holder != holder:
                if move.process.gone() or time.monotonic() > until:
                    break
                time.sleep(0.1)
                params = self._tracking.params(log)
            if f"{key}.done.{number}" in params:
                continue
            version = self._register(model, move, card if move.holder == holder else "")
            self._tracking.do(
                lambda client, version=version: client.set_registered_model_alias(  # type: ignore[misc]
                    model, alias, str(version.version)
                )
            )
            self._tracking.once(log, f"{key}.done.{number}", str(version.version))
        return number

    def _register(self, model: str, move: Move, card: str) -> Version:
        ref = move.to
        try:
            self._tracking.do(lambda client: client.create_registered_model(model))
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
        versions: Any = self._tracking.do(
            lambda client: client.search_model_versions(f"name = '{model}' and tags.`{DIGEST_TAG}` = '{ref.digest}'")
        )
        if versions:
            return _version(min(versions, key=lambda item: int(item.version)))
        if self._log_card is not None and card:
            self._log_card(card)
        made = self._tracking.do(
            lambda client: client.create_model_version(
                model,
                source=f"runs:/{ref.run}/{ref.path}",
                run_id=ref.run,
                tags={**move.tags, CHECKPOINT_TAG: ref.model_dump_json(), DIGEST_TAG: ref.digest},
                description=card[:_LONGEST_DESCRIPTION] or None,
            )
        )
        return Version(version=int(made.version), checkpoint=ref)


def _key(model: str, alias: str) -> str:
    return hashlib.sha256(f"{model}\0{alias}".encode()).hexdigest()


def _version(found: Any) -> Version:
    text = found.tags.get(CHECKPOINT_TAG)
    if text is None:
        raise ArtifactError(
            f"version {found.version} of {found.name} names its checkpoint",
            "it was registered by other means",
            "point the alias at a version that LazyTrain registered, or use another registered model",
        )
    return Version(version=int(found.version), checkpoint=Ref.model_validate_json(text))


def _moved(model: str, alias: str, found: str | None, seen: str | None) -> ArtifactError:
    return ArtifactError(
        f"{model}@{alias} names {seen or 'nothing'}, as the verdict saw it",
        f"it names {found or 'nothing'} now; nothing was moved",
        "evaluate and judge against the champion of now, then promote",
    )
