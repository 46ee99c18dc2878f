"""Accuracy at the labelled positions of a batch."""

import torch

from .task import IGNORE_INDEX

__all__ = ["labelled_accuracy"]


def labelled_accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """The share, 0 to 1, of labelled positions (label other than -100) where the predicted token equals the label.

    predictions and labels: int64 or int32 tensors of one shape, usually [B, T]; pass logits as logits.argmax(-1).
    ValueError: other dtypes, different shapes, no labelled position.
    """
    for name, tokens in (("predictions", predictions), ("labels", labels)):
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        if kind not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be an int64 or int32 tensor, got {kind}; take the argmax of logits first")
    if predictions.shape != labels.shape:
        raise ValueError(
            f"predictions must have the shape of labels, {list(labels.shape)}, got {list(predictions.shape)}; "
            "predict one token a position"
        )
    labelled = labels != IGNORE_INDEX
    if not labelled.any():
        raise ValueError("labels must hold at least one label, got only -100; pass a batch with queries")
    return (predictions == labels)[labelled].double().mean().item()
