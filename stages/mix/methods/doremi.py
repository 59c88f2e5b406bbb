"""DoReMi: parts that a reference model shows can still be learnt are sampled more.

λ_d is the mean over a part's visits of what their loss was above the reference model's, at least 0 for each visit; the
shares follow α ← α exp(ηλ), scaled to sum to 1, then (1 − c)α + c/K. Source: Xie et al. 2023 (arXiv 2305.10429),
algorithm 1. There the excess is cut at 0 for each token and α moves at every step; here for each visit, as training
notes one loss a visit, and from one selection to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError
from stages.mix.mixture import Given, Mixed, Mixture, normalised
from stages.mix.probing import Probing


class Doremi(Mixture):
    """Exponentiated gradient on the excess over a reference, between rounds.

    The reference is given by hand, or is a short training of adapters on the prior mixture from the model as it stands:
    its loss on a visited row, against the row's loss when it was visited.
    """

    reads = frozenset({"example_losses", "model"})

    eta: float = Field(1.0, gt=0, description="Step of the exponentiated gradient. Xie et al., section 2.")
    smoothing: float = Field(1e-3, ge=0, lt=1, description="Share that is spread over all parts alike: c.")
    reference: dict[str, float] | None = Field(
        None, description="Loss of an answer token of each source under a reference model, nats; unset trains one."
    )
    reference_rows: int = Field(64, ge=1, description="Most visited rows of a part that a trained reference is put to.")
    probe: Probing = Field(default_factory=Probing, description="How the reference is trained.")

    def mix(self, given: Given) -> Mixed:
        """Return the shares moved by one step; where nothing was visited, as they were."""
        part_V, excess_V, tokens_V = self._by_hand(given) if self.reference is not None else self._trained(given)
        parts = len(given.parts)
        tokens_P = np.bincount(part_V, tokens_V, minlength=parts)
        excess_P = np.bincount(part_V, np.maximum(excess_V, 0.0), minlength=parts) / np.maximum(tokens_P, 1)
        share_P = exponentiated(given.share_P, excess_P, self.eta, self.smoothing)
        facts = {f"excess of {part}": float(f"{value:.4g}") for part, value in zip(given.parts, excess_P, strict=True)}
        return Mixed(share_P, facts=facts)

    def _by_hand(self, given: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (part, loss above the reference's, answer tokens) of each visit."""
        assert self.reference is not None
        missing = sorted(set(given.parts) - set(self.reference))
        if missing:
            raise ConfigError(
                "`select.mixture.reference` holds a loss for every source of the pool",
                f"there is none for {missing[0]!r}",
                "add it, or leave `reference` out",
            )
        reference_P = np.array([self.reference[part] for part in given.parts])
        part_V, loss_V, tokens_V = (
            np.concatenate([getattr(segment, name) for segment in given.visited])
            for name in ("part_V", "loss_V", "tokens_V")
        )
        return part_V, loss_V - reference_P[part_V] * tokens_V, tokens_V

    def _trained(self, given: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likewise, for some rows of each part, of their last visit."""
        latest: dict[int, list[Any]] = {}
        for segment in given.visited:
            columns = (segment.row_V, segment.part_V, segment.loss_V, segment.tokens_V)
            for row, *seen in zip(*map(np.ndarray.tolist, columns), strict=True):
                latest[row] = seen
        part_of = {row: part for row, (part, *_) in latest.items()}
        rows = np.array(sorted(latest), dtype=np.int64)
        kept = []
        for part in range(len(given.parts)):
            mine = given.rng.permutation(rows[[part_of[row] == part for row in rows.tolist()]])
            kept.append(np.sort(mine[: self.reference_rows]))
        chosen = np.concatenate(kept)
        lab = given.lab()
        adapter = lab.probe("reference", given.prior * given.answers_a_unit, self.probe)
        loss_V, _ = lab.pool_losses(chosen, [adapter], np.ones(1))
        found = [latest[row] for row in chosen.tolist()]
        part_V, before_V, tokens_V = (np.array(column) for column in zip(*found, strict=True))
        return part_V.astype(np.int64), before_V - loss_V, tokens_V


def exponentiated(share_P: np.ndarray, excess_P: np.ndarray, eta: float, smoothing: float) -> np.ndarray:
    """Return (1 − c) α exp(ηλ)/Σ + c/K."""
    grown_P = normalised(share_P * np.exp(eta * (excess_P - excess_P.max())))
    return np.asarray((1 - smoothing) * grown_P + smoothing / len(share_P))
