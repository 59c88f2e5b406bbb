"""OP-Mix: the mixture whose loss is least on the surface between adapters of the live model.

A short training on each part alone gives Δ_d; the target's losses at θ + Σ x_d Δ_d are read at many mixtures x without
any further training, fitted by y = exp(c) + exp(⟨t, x⟩), and the penalised least is taken. One mixture is then really
trained: where the surface does not say its loss, the prior stays. Source: arXiv 2605.15220. Cost: P + 1 short trainings
and a forward pass over the target a point. x is of answer tokens; the share it gives is in the selection's unit.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.errors import ConfigError
from data_contracts.records import Table
from stages.mix.mixture import Given, Mixed, Mixture, normalised
from stages.mix.probing import Probing
from stages.mix.surface import Surface, choose, fit
from stages.statistics.rank import spearman


class OpMix(Mixture):
    """Choose the mixture by interpolated adapters."""

    reads = frozenset({"model"})

    probe: Probing = Field(default_factory=Probing, description="How each part's adapter is trained.")
    points: int = Field(20, ge=4, description="Interpolated mixtures that are fitted, beside the parts alone.")
    held_out: int = Field(8, ge=3, description="Interpolated mixtures that the fit is judged by.")
    penalty: float = Field(0.05, gt=0, description="Weight of KL(x ‖ prior), nats.")
    starts: int = Field(30, ge=1, description="Random starts of the fit, for each of ten of its floor.")
    target_rows: int | None = Field(256, ge=1, description="Most target rows of a group that are read; unset is all.")
    most_parts: int = Field(16, ge=2, description="More parts than these are refused: each costs a training.")
    least_correlation: float = Field(
        0.8, ge=-1, le=1, description="Rank correlation on held-out mixtures below which the prior stays."
    )
    tolerance: float = Field(
        0.5, gt=0, description="Error at the trained mixture above which the prior stays, of the losses' range."
    )

    def mix(self, given: Given) -> Mixed:
        """Return the mixture, or the prior with the reason. Raises `ConfigError` for more parts than `most_parts`."""
        parts = len(given.parts)
        if parts > self.most_parts:
            raise ConfigError(
                f"op_mix tries at most {self.most_parts} parts",
                f"the pool has {parts} sources",
                "name coarser ones by `ingest.source_field`, or raise `most_parts`",
            )
        if parts == 1:
            return Mixed(given.prior, facts={"verdict": "there is one part"})
        lab, ratio_P = given.lab(), given.answers_a_unit
        adapters = [lab.probe(str(part), np.eye(parts)[part], self.probe) for part in range(parts)]
        prior_P = normalised(given.prior * ratio_P)
        x_XP = np.vstack([np.eye(parts), prior_P, given.rng.dirichlet(np.ones(parts), self.points + self.held_out - 1)])
        y_XG = np.stack([lab.target_losses(adapters, x_P, self.target_rows) for x_P in x_XP])
        fitted = parts + self.points
        surface = fit(x_XP[:fitted], y_XG[:fitted], given.rng, starts=self.starts)
        chosen_P = choose(surface, prior_P, self.penalty)
        trained = lab.probe("chosen", chosen_P, self.probe)
        seen_G = lab.target_losses([trained], np.ones(1), self.target_rows)
        verdict, facts = self._judged(surface, x_XP, y_XG, chosen_P, seen_G, fitted)
        share_P = normalised(chosen_P / ratio_P) if not verdict else given.prior
        if verdict:
            given.notice(f"op_mix keeps the pool's mixture: {verdict}")
        lines = [
            (part, *(float(f"{value:.4g}") for value in (prior, chosen, own)))
            for part, prior, chosen, own in zip(given.parts, prior_P, chosen_P, y_XG[:parts].mean(axis=1), strict=True)
        ]
        columns = ("part", "prior, of answer tokens", "least on the surface", "target loss at this part alone")
        return Mixed(
            share_P,
            facts={"verdict": verdict or "taken", **facts},
            tables=(Table(title="Loss over mixtures", columns=columns, rows=tuple(lines)),),
        )

    def _judged(
        self,
        surface: Surface,
        x_XP: np.ndarray,
        y_XG: np.ndarray,
        chosen_P: np.ndarray,
        seen_G: np.ndarray,
        fitted: int,
    ) -> tuple[str, dict[str, float | None]]:
        """Return (why the surface is not believed, "" where it is; the numbers)."""
        said_X, read_X = surface(x_XP).mean(axis=1), y_XG.mean(axis=1)
        correlation = spearman(said_X[fitted:], read_X[fitted:])
        spread = float(np.ptp(read_X))
        said, seen = float(surface(chosen_P[None]).mean()), float(seen_G.mean())
        numbers = {
            "rank_correlation": correlation,
            "loss_range": spread,
            "loss_said_at_prior": float(said_X[len(chosen_P)]),
            "loss_said_at_choice": said,
            "loss_trained_at_choice": seen,
        }
        facts = {name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()}
        if correlation is None or correlation < self.least_correlation:
            return f"on held-out mixtures the fit has rank correlation {facts['rank_correlation']}", facts
        if abs(said - seen) > self.tolerance * spread:
            return f"its loss was said to be {said:.4g} and is {seen:.4g} trained, over a range of {spread:.3g}", facts
        return "", facts
