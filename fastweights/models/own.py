"""What all models of this library have in common for transformers: first values, Trainer, and a model
card beside the weights."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..layers.initialization import OwnInitialMatrices, OwnInitialValues
from ..layers.weight_decay import undecayed_parameters
from ..private_huggingface import adapt_trainer
from .card import find_use, write_card
from .configuration import how_to_load
from .rows import leave_out_unpredicted

__all__ = ["OwnModel"]


class OwnModel:
    """In front of a `PreTrainedModel`."""

    _accepts_loss_kwargs = True
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._made_with_cache = config.use_cache

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether Trainer passes num_items_in_batch to forward, unless it is set. transformers' Trainer asks every model for it
        when it is made, which is the moment to adapt it."""
        adapt_trainer(_clear_unpredicted_labels, _undecayed)
        return self._accepts_loss_kwargs

    @accepts_loss_kwargs.setter
    def accepts_loss_kwargs(self, accepts: bool) -> None:
        self._accepts_loss_kwargs = accepts

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """First values of one module's own parameters; our layers know theirs. transformers' init functions leave alone what a
        checkpoint gave."""
        if isinstance(module, OwnInitialValues):
            std = self.config.initializer_range
            own = module.initial_values(std) if isinstance(module, OwnInitialMatrices) else module.initial_values()
            for name, value in own.items():
                init.copy_(module.get_parameter(name), value)
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers, with a model card (README.md) where there is none yet.

        config.use_cache is saved as the model was made with it: transformers' Trainer sets it to False, which would leave the
        model without a cache when it is loaded.
        """
        self.config.how_to_load = how_to_load(find_use(self).auto_class)
        in_training, self.config.use_cache = self.config.use_cache, self._made_with_cache
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.use_cache = in_training
        if is_main_process:
            write_card(Path(save_directory), self)


def _clear_unpredicted_labels(model: nn.Module, batches: list[Any]) -> None:
    """Take labels that no token predicts out of the batches of a step of Trainer, for models whose class says
    `_predicts_labels = True`, also within an adapter.

    Trainer divides the losses of all micro-batches of a step by the number of their labels, which it counts before the model
    reads the first of them. The first token of a padded row or of a packed document is among them, although no token predicts
    it: losses and gradients would be too small. No forward can mend that, because it sees one micro-batch of several.
    """
    if any(getattr(module, "_predicts_labels", False) for module in model.modules()):
        for batch in batches:
            if isinstance(batch, MutableMapping):  # TRL's GRPOTrainer has lists of prompts here
                leave_out_unpredicted(batch)


def _undecayed(model: nn.Module) -> set[str]:
    """`undecayed_parameters` of a model with layers of this library; none of another, whose marks may mean something else."""
    ours = any(isinstance(module, OwnInitialValues) for module in model.modules())
    return undecayed_parameters(model) if ours else set()
