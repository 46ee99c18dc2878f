"""Whether a score tells right answers from wrong ones: ranking, abstention, calibration."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["auroc", "calibration_error", "fitted_probability", "reliability", "selective_accuracy"]


def auroc(score: Tensor, positive: Tensor) -> float:
    """The chance that a positive has a higher score than a negative, ties counted half; NaN without one of the two. Both [N]."""
    levels, place, counts = score.unique(return_inverse=True, return_counts=True)
    below = counts.cumsum(0) - counts
    rank = (below + (counts - 1) / 2)[place].double()
    ups, downs = int(positive.sum()), int((~positive).sum())
    if not ups or not downs:
        return float("nan")
    return ((rank[positive].sum() - ups * (ups - 1) / 2) / (ups * downs)).item()


def selective_accuracy(uncertainty: Tensor, right: Tensor, coverage: float) -> float:
    """The accuracy on the share `coverage` of the answers with the lowest uncertainty."""
    kept = max(1, round(coverage * len(right)))
    return right[uncertainty.argsort(stable=True)[:kept]].double().mean().item()


def reliability(probability: Tensor, outcome: Tensor, groups: int) -> list[tuple[float, float]]:
    """Mean predicted and mean observed in groups of equal size, from the lowest prediction to the highest."""
    order = probability.argsort(stable=True)
    return [
        (probability[part].double().mean().item(), outcome[part].double().mean().item())
        for part in order.tensor_split(groups)
    ]


def calibration_error(probability: Tensor, outcome: Tensor, groups: int = 10) -> float:
    """The mean distance between predicted and observed over `groups` of equal size."""
    pairs = reliability(probability, outcome, groups)
    return sum(abs(predicted - observed) for predicted, observed in pairs) / len(pairs)


def fitted_probability(features: Tensor, right: Tensor, new_features: Tensor) -> Tensor:
    """The probability of `right` by logistic regression on features [N, F], for new_features [M, F]."""
    mean, deviation = features.mean(0), features.std(0).clamp_min(1e-9)

    def with_constant(x: Tensor) -> Tensor:
        return torch.cat([(x - mean) / deviation, torch.ones_like(x[:, :1])], 1).double()

    X, y = with_constant(features), right.double()
    weight = X.new_zeros(X.shape[1])
    small = 1e-3 * torch.eye(len(weight), dtype=X.dtype)  # answers that a feature separates need a bound
    for _ in range(30):  # Newton's method
        p = torch.sigmoid(X @ weight)
        slope = X.T @ (p - y) / len(y) + small @ weight
        curvature = (X * (p * (1 - p))[:, None]).T @ X / len(y) + small
        weight = weight - torch.linalg.solve(curvature, slope)
    return torch.sigmoid(with_constant(new_features) @ weight)
