"""Recall accuracy: the fraction of queries on held-out sequences that a model answers with the right value."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..checks import check_device, check_size, check_whole_number, describe_value
from ..data import IGNORE_INDEX, Batch
from ..kinds import checked
from .causal_models import token_logits
from .reading import MOST_EXAMPLES, TEST_BATCH, check_model, evaluating, hidden_blocks

__all__ = ["recall_accuracy", "right_and_asked"]

_TEST_TOKENS = 2**16  # of the sequences of one forward pass: the model reads long ones a few at a time


class Task(Protocol):
    """A source of labelled batches: a `RecallTask`, or one in words of a text model's vocabulary."""

    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Batch: ...


@checked
def recall_accuracy(
    model: Any,
    task: Task,
    *,
    seed: int,
    examples: int,
    device: str | torch.device = "cpu",
    block: int = 512,
    finite: bool = False,
) -> float:
    """The part, from 0 to 1, of the queries of `examples` test sequences whose most likely token is the right one.

    block: tokens to read at a time. finite: logits that are not finite are refused (ValueError) and not counted as wrong.
    """
    right_T, asked_T = right_and_asked(
        model, task, seed=seed, examples=examples, device=device, block=block, finite=finite
    )
    return int(right_T.sum()) / int(asked_T.sum())


def right_and_asked(
    model: Any,
    task: Task,
    *,
    seed: int,
    examples: int,
    device: str | torch.device = "cpu",
    block: int = 512,
    finite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of `examples` test sequences have a right answer, and how many a label, at each token: int64 [T] twice.
    Arguments as for `recall_accuracy`."""
    check_model(model)
    if not callable(getattr(task, "batch", None)):
        raise TypeError(f"task must be a RecallTask, got {describe_value(task)}; make_task makes one of a name")
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_whole_number("seed", seed)
    check_size("block", block)
    check_device(device)
    right_T = asked_T = torch.zeros((), dtype=torch.int64)
    with evaluating(model):
        for index, start in enumerate(range(0, examples, TEST_BATCH)):
            batch = task.batch("test", seed=seed, index=index, batch_size=min(TEST_BATCH, examples - start))
            rows = max(1, _TEST_TOKENS // batch.input_ids.shape[1])
            for input_ids, labels in zip(batch.input_ids.split(rows), batch.labels.split(rows), strict=True):
                right_BT = torch.zeros_like(labels)
                for place, logits, wanted in _labelled_blocks(model, input_ids.to(device), labels.to(device), block):
                    if finite and not logits.isfinite().all():
                        raise ValueError(
                            "model must give finite logits, got NaN or infinite ones; its weights are damaged"
                        )
                    right_BT[:, place : place + block][(labels != IGNORE_INDEX)[:, place : place + block]] = (
                        logits.argmax(-1) == wanted
                    ).to(right_BT)
                right_T = right_T + right_BT.sum(0)
                asked_T = asked_T + (labels != IGNORE_INDEX).sum(0)
    return right_T, asked_T


def _labelled_blocks(
    model: Any, input_ids: torch.Tensor, labels: torch.Tensor, block: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Logits [N, vocabulary] and labels [N] of the N labelled positions of each block that has any, behind the block's first
    position. Only the model's cache outlives a block."""
    for start, hidden in hidden_blocks(model, input_ids, block):
        here = labels[:, start : start + block]
        queries = here != IGNORE_INDEX
        if queries.any():
            yield start, token_logits(model, hidden[queries]), here[queries]
