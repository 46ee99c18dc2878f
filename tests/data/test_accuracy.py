"""Accuracy counts labelled positions, and only those."""

import pytest
import torch

from fastweights.data import labelled_accuracy, make_task

LABELS = torch.tensor([[-100, 7, -100], [3, -100, 5]])


@pytest.mark.parametrize(
    ("predictions", "wanted"),
    [
        ([[0, 7, 0], [3, 0, 5]], 1.0),
        ([[-100, 0, -100], [0, -100, 0]], 0.0),  # right at the unlabelled positions only
        ([[9, 7, 9], [3, 9, 6]], 2 / 3),
    ],
)
def test_exact_match_at_labelled_positions(predictions: list[list[int]], wanted: float) -> None:
    assert labelled_accuracy(torch.tensor(predictions), LABELS) == pytest.approx(wanted, abs=1e-12)


def test_a_model_that_looks_the_key_up_is_right() -> None:
    input_ids, labels = make_task("mqar", pairs=6, vocab_size=40).batch("test", seed=0, index=0, batch_size=10)
    context = input_ids[:, :12].view(10, 6, 2)
    found = (context[:, None, :, 0] == input_ids[:, :, None]).int().argmax(2)
    assert labelled_accuracy(context[:, :, 1].gather(1, found), labels) == 1.0
    assert labelled_accuracy(input_ids, labels) == 0.0


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (torch.zeros(2, 3), LABELS, "predictions must be an int64 or int32 tensor, got torch.float32"),
        ([[0, 0, 0]], LABELS, "predictions must be .* got list"),
        (LABELS, LABELS == 7, "labels must be .* got torch.bool"),
        (LABELS[:1], LABELS, r"predictions must have the shape of labels, \[2, 3\], got \[1, 3\]"),
        (LABELS[:, :1], torch.full((2, 1), -100), "at least one label"),
        (LABELS[:0], LABELS[:0], "at least one label"),
    ],
)
def test_bad_input(predictions: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labelled_accuracy(predictions, labels)
