"""Labels as transformers' Trainer counts them."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ..ops.framework.sequences import check_cu_seqlens
from .loss import IGNORED
from .rows import cumulative_lengths, predicted_labels

__all__ = ["count_predicted_labels"]


def count_predicted_labels(model_class: type) -> None:
    """Let transformers' Trainer, once it is imported, count for models of a class the labels that a token predicts.

    Trainer divides the losses of all micro-batches of a step by the number of their labels, which it counts before the model
    reads the first of them. The first token of a padded row or of a packed document is among them, although no token predicts
    it: losses and gradients would be too small. No forward can mend that, because it sees one micro-batch of several, and
    Trainer asks the model for nothing there.
    """
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        _change(module.Trainer, model_class)


@cache
def _change(trainer_class: Any, model_class: type) -> None:
    original = trainer_class._get_num_items_in_batch

    @wraps(original)
    def _get_num_items_in_batch(self: Any, batch_samples: list, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(module, model_class) for module in self.model.modules()):
            for batch in batch_samples:
                if isinstance(batch, MutableMapping):  # TRL's GRPOTrainer has lists of prompts here
                    _leave_out_unpredicted(batch)
        return original(self, batch_samples, *arguments, **options)

    trainer_class._get_num_items_in_batch = _get_num_items_in_batch


def _leave_out_unpredicted(batch: MutableMapping[str, Any]) -> None:
    """Put -100 into the labels of a batch where no token predicts them, so that every loss of Trainer leaves them out too."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or not labels.shape[1]:
        return
    lengths = cumulative_lengths(*(batch.get(name) for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")))
    check_cu_seqlens(lengths, *labels.shape)
    documents = {name: batch.get(name) for name in ("attention_mask", "position_ids", "seq_idx")}
    labels = predicted_labels(labels, cu_seqlens=lengths, **documents)
    batch["labels"] = torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, 1:]], 1)
