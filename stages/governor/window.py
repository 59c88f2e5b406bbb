"""How many examples an optimizer step should see, once the warm-up has measured the gradient's noise.

The gradient noise scale tr(Σ)/|G|² (answer tokens) is the batch at which a step's progress is half of what the exact
gradient would give: below it, halving the batch nearly doubles the steps; above it, examples are wasted (McCandlish et
al. 2018, arXiv 1812.06162, section 2.2). The estimate is rough: a window that is not off by two is left as configured.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

LEAST, MOST_TIMES, DEAD_BAND = 4, 4, 2.0


def window_for(configured: int, curves: Iterable[pa.Table], mean_answer_tokens: float) -> tuple[int, float | None]:
    """Return (examples a step, noise scale in answer tokens; None where no curve has it).

    Args:
        configured: `plan.window`.
        curves: of the segments so far; the last measured value of the latest one counts.
        mean_answer_tokens: of an example.

    The result stays between 4 (or `configured`, where that is less) and 4 times `configured`.
    """
    measured = [
        float(values[-1])
        for curve in curves
        if len(values := curve.column("gradient_noise").drop_null().to_numpy()) and np.isfinite(values[-1])
    ]
    if not measured or measured[-1] <= 0:
        return configured, None
    wanted = measured[-1] / mean_answer_tokens
    if configured / DEAD_BAND < wanted < configured * DEAD_BAND:
        return configured, measured[-1]
    return int(np.clip(round(wanted), min(LEAST, configured), MOST_TIMES * configured)), measured[-1]
