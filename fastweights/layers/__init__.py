"""Sequence mixers: modules around one memory rule each, and the registry that names them."""

from .cache import LayerCache
from .delta_net import DeltaNet
from .linear_attention import LinearAttention
from .mixer import Mixer
from .registry import MIXERS, MixerSpec, build_mixer
from .softmax_attention import SoftmaxAttention

__all__ = [
    "MIXERS",
    "DeltaNet",
    "LayerCache",
    "LinearAttention",
    "Mixer",
    "MixerSpec",
    "SoftmaxAttention",
    "build_mixer",
]
