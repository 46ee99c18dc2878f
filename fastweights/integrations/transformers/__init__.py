"""Models of transformers with a gated delta rule or Kimi Delta Attention, run by the ops of this library."""

from .patching import FAMILIES, accelerate, restore

__all__ = ["FAMILIES", "accelerate", "restore"]
