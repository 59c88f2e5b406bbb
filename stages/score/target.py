"""What each target group asks of the weights: its mean gradient, preconditioned as the optimizer would.

D Ḡⱼ with Ḡⱼ the mean over group j of each example's mean answer-token gradient and D = 1/(√v̂ + ε) from the checkpoint's
Adam moments. Every kind of influence is a product with these directions; how it is read is left to the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from data_contracts.errors import InputError
from stages.score.scorer import Given

if TYPE_CHECKING:
    from torch import Tensor

    from stages.model.batch import TokenBatch


def target_directions(given: Given) -> dict[str, Tensor]:
    """Return D Ḡ by parameter name, shape (J, *parameter.shape).

    One training pass over the target, counted. The caller drops `given.trained.moments` once it needs them no more:
    they are as large as two models. Raises `InputError` where there is no target, or a target row has no
    token to predict.
    """
    import torch

    from stages.gradients.precondition import mean_gradient

    trained = given.trained
    assert trained is not None
    require_target(given)
    directions: dict[str, Tensor] = {}
    for column, rows in enumerate(given.members):
        gradient, _, _ = mean_gradient(trained.model, _counted(given, rows), autocast=given.autocast)
        for name, value in preconditioned(gradient, given).items():
            if name not in directions:
                directions[name] = torch.zeros(
                    (len(given.members), *value.shape), dtype=value.dtype, device=value.device
                )
            directions[name][column] = value
    return directions


def preconditioned(gradient: dict[str, Tensor], given: Given) -> dict[str, Tensor]:
    """Return D times `gradient`, elementwise; the gradient itself, and a notice, where there are no moments."""
    from stages.gradients.precondition import precondition

    adam = adam_settings(given)
    return precondition(gradient, **adam) if adam else gradient


def adam_settings(given: Given) -> dict[str, Any]:
    """Return moments, updates, beta2 and epsilon of the checkpoint; nothing, and a notice, where it has no moments."""
    trained = given.trained
    assert trained is not None
    updates = int(trained.trainer.get("updates", 0))
    if not trained.moments or updates < 1:
        given.notice(
            "influence: there is no checkpoint with Adam moments, so gradients are compared as they are (D = 1); "
            "a warm-up gives moments and usually a better ranking"
        )
        return {}
    beta2, epsilon = float(trained.trainer["beta2"]), float(trained.trainer["epsilon"])
    return {"moments": trained.moments, "updates": updates, "beta2": beta2, "epsilon": epsilon}


def checkpoint_weights(given: Given) -> list[float]:
    """Return each checkpoint's share of the sum of their learning rates; equal shares where all are 0 or unknown."""
    rates = [float(trained.trainer.get("learning_rate", 0.0)) for trained in given.checkpoints]
    total = sum(rates)
    return [rate / total if total > 0 else 1 / len(rates) for rate in rates]


def require_target(given: Given) -> None:
    """Raise `InputError` where there is no target row."""
    if given.target is None or not len(given.target):
        raise InputError("a target with at least one row", "it has none", "name files under `data.target`")


def target_mean(given: Given, features: Callable[[TokenBatch], np.ndarray]) -> np.ndarray:
    """Return the mean feature of each group's rows, (J, K) float64; `features` gives those of a batch, (D, K).

    Raises `InputError` where there is no target, or a target row has no token to predict.
    """
    from stages.gradients.precondition import require_answers

    require_target(given)
    means = []
    for members in given.members:
        total_K: np.ndarray | float = 0.0
        for batch in target_batches(given, members):
            require_answers(batch)
            total_K = total_K + features(batch).astype(np.float64).sum(axis=0)
        means.append(np.asarray(total_K) / len(members))
    return np.stack(means)


def worth(product_DJ: Tensor, answer_tokens_D: Tensor, per: Literal["visit", "token"]) -> np.ndarray:
    """Return score_DJ float32 of the products of summed answer losses; NaN where nothing is predicted."""
    tokens_D1 = answer_tokens_D[:, None].double()
    unit_D1 = tokens_D1 if per == "token" else tokens_D1.new_ones(tokens_D1.shape)
    return np.asarray((product_DJ / unit_D1.masked_fill(tokens_D1 == 0, float("nan"))).float().cpu())


def target_batches(given: Given, rows: np.ndarray) -> Iterator[TokenBatch]:
    """Yield these target rows as batches on the device; counting what is done with them is the caller's."""
    from stages.model.batch import collate, length_buckets

    assert given.target is not None
    for bucket in length_buckets([int(given.target.lengths[row]) for row in rows], given.batch_tokens):
        yield collate([given.target.row(int(rows[item])) for item in bucket]).to(given.device)


def _counted(given: Given, rows: np.ndarray) -> Iterator[TokenBatch]:
    for batch in target_batches(given, rows):
        given.meter.train(batch)
        yield batch
