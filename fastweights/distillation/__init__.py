"""Distillation: a student with constant-memory layers learns from the pretrained Transformer that it was converted from."""

from .losses import hidden_loss, summed_kl

__all__ = ["hidden_loss", "summed_kl"]
