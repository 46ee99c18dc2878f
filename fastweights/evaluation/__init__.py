"""Measuring trained models."""

from .recall import recall_accuracy

__all__ = ["recall_accuracy"]
