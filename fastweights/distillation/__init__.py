"""Distillation: a student with constant-memory layers learns from the pretrained Transformer that it was converted from."""

from .distill import distill
from .held_out import HeldOutKL
from .losses import hidden_loss, summed_kl
from .report import compare_models
from .run import DistillRun
from .selection import SelectionSettings, auto_layers, rank_layers, rows_of_documents

__all__ = [
    "DistillRun",
    "HeldOutKL",
    "SelectionSettings",
    "auto_layers",
    "compare_models",
    "distill",
    "hidden_loss",
    "rank_layers",
    "rows_of_documents",
    "summed_kl",
]
