"""Sequence mixers: modules around one memory rule each, and the registry that names them."""

from .cache import LayerCache
from .delta_net import DeltaNet
from .gated_kalmanet import GatedKalmaNet
from .lattice import Lattice
from .linear_attention import LinearAttention
from .mesa import MesaNet
from .mixer import Mixer
from .palimpsa_d import PalimpsaD
from .palimpsa_m import PalimpsaM
from .registry import MIXERS, MixerSpec, build_mixer
from .rls import RecursiveLeastSquares
from .softmax_attention import SoftmaxAttention
from .ttt import TestTimeTraining
from .vla import VariationalLinearAttention

__all__ = [
    "MIXERS",
    "DeltaNet",
    "GatedKalmaNet",
    "Lattice",
    "LayerCache",
    "LinearAttention",
    "MesaNet",
    "Mixer",
    "MixerSpec",
    "PalimpsaD",
    "PalimpsaM",
    "RecursiveLeastSquares",
    "SoftmaxAttention",
    "TestTimeTraining",
    "VariationalLinearAttention",
    "build_mixer",
]
