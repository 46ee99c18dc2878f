"""What transformers' Trainer does otherwise for the models of this library: which labels it counts, and which parameters decay.

It asks a model for neither, so its two methods are wrapped. For other models they do what they did.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.initialization import OwnInitialValues
from ..layers.weight_decay import undecayed_parameters
from ..ops.framework.sequences import check_cu_seqlens
from .loss import IGNORED
from .rows import cumulative_lengths, predicted_labels

__all__ = ["adapt_trainer"]


def adapt_trainer() -> None:
    """Let transformers' Trainer, once it is imported, count the labels that a token predicts, in batches for models whose class
    says `_predicts_labels = True`, and leave `undecayed_parameters` without weight decay in models with layers of this library.

    Trainer divides the losses of all micro-batches of a step by the number of their labels, which it counts before the model
    reads the first of them. The first token of a padded row or of a packed document is among them, although no token predicts
    it: losses and gradients would be too small. No forward can mend that, because it sees one micro-batch of several.
    """
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        _change(module.Trainer)


@cache
def _change(trainer_class: Any) -> None:
    count, decayed_names = trainer_class._get_num_items_in_batch, trainer_class.get_decay_parameter_names

    @wraps(count)
    def _get_num_items_in_batch(self: Any, batch_samples: list, *arguments: Any, **options: Any) -> Any:
        # An adapter may be around the model.
        if any(getattr(module, "_predicts_labels", False) for module in self.model.modules()):
            for batch in batch_samples:
                if isinstance(batch, MutableMapping):  # TRL's GRPOTrainer has lists of prompts here
                    _leave_out_unpredicted(batch)
        return count(self, batch_samples, *arguments, **options)

    @wraps(decayed_names)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        names = decayed_names(self, model)
        is_ours = any(isinstance(module, OwnInitialValues) for module in model.modules())
        undecayed = undecayed_parameters(model) if is_ours else ()
        return [name for name in names if name not in undecayed]

    trainer_class._get_num_items_in_batch = _get_num_items_in_batch
    trainer_class.get_decay_parameter_names = get_decay_parameter_names


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
