"""Recall accuracy: how many of the queried values a model names right on held-out sequences."""

from typing import Any

import torch

from ..data import IGNORE_INDEX, RecallTask

__all__ = ["labelled_logits", "recall_accuracy"]

_TEST_BATCH = 128


def labelled_logits(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, vocabulary] and labels [N] at the N positions that must predict something (label other than -100).

    Only these positions go through the output projection, which is most of a small model's cost when the vocabulary is
    large. input_ids and labels are [B, T]; the label stands at the position that predicts it (no shift).
    """
    asked = labels != IGNORE_INDEX
    hidden = model.model(input_ids).last_hidden_state
    return model.lm_head(hidden[asked]), labels[asked]


@torch.no_grad()
def recall_accuracy(
    model: Any, task: RecallTask, *, seed: int, examples: int, device: str | torch.device = "cpu"
) -> float:
    """The part, from 0 to 1, of the queries of `examples` test sequences whose most likely token is the right one."""
    was_training = model.training
    model.eval()
    right = asked = 0
    for index, start in enumerate(range(0, examples, _TEST_BATCH)):
        batch = task.batch("test", seed=seed, index=index, batch_size=min(_TEST_BATCH, examples - start))
        logits, labels = labelled_logits(model, batch.input_ids.to(device), batch.labels.to(device))
        right += int((logits.argmax(-1) == labels).sum())
        asked += labels.numel()
    model.train(was_training)
    return right / asked
