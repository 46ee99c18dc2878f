"""Hybrids made of pretrained Transformers: attention of some layers is kept, the others have memories of constant size."""

from .cache import HybridCache
from .families import FAMILIES, Family, find_family, hybrid_config, hybrid_model
from .linearize import keep_layers, linearize
from .model import HybridModel

__all__ = [
    "FAMILIES",
    "Family",
    "HybridCache",
    "HybridModel",
    "find_family",
    "hybrid_config",
    "hybrid_model",
    "keep_layers",
    "linearize",
]
