"""Distillation: a student with constant-memory layers learns from the pretrained Transformer that it was converted from."""

from .distill import distill, plan_distillation
from .losses import hidden_loss, summed_kl
from .run import DistillRun

__all__ = ["DistillRun", "distill", "hidden_loss", "plan_distillation", "summed_kl"]
