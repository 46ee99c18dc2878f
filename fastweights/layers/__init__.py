"""Sequence mixers: modules around one memory rule each, and the registry that names them."""

from ..plugins import import_mixers
from .cache import LayerCache
from .choice import MixerChoice, parse_mixers
from .delta_net import DeltaNet
from .gated_kalmanet import GatedKalmaNet
from .lattice import Lattice
from .linear_attention import LinearAttention
from .longhorn import ElementwiseLonghorn
from .memory_layer import MemoryLayer, RuleCall
from .mesa import MesaNet
from .mixer import Mixer
from .options import DecayOptions, MemoryOptions, MixerOptions, ProjectionOptions, option
from .palimpsa_d import PalimpsaD
from .palimpsa_m import PalimpsaM
from .probe import Seen, probe
from .registry import MIXERS, MixerSpec, build_mixer, register_mixer
from .rls import RecursiveLeastSquares
from .softmax_attention import SoftmaxAttention
from .ttt import TestTimeTraining
from .vla import VariationalLinearAttention
from .vla_baselines import PrintedDeltaNet

__all__ = [
    "MIXERS",
    "DecayOptions",
    "DeltaNet",
    "ElementwiseLonghorn",
    "GatedKalmaNet",
    "Lattice",
    "LayerCache",
    "LinearAttention",
    "MemoryLayer",
    "MemoryOptions",
    "MesaNet",
    "Mixer",
    "MixerChoice",
    "MixerOptions",
    "MixerSpec",
    "PalimpsaD",
    "PalimpsaM",
    "PrintedDeltaNet",
    "ProjectionOptions",
    "RecursiveLeastSquares",
    "RuleCall",
    "Seen",
    "SoftmaxAttention",
    "TestTimeTraining",
    "VariationalLinearAttention",
    "build_mixer",
    "import_mixers",
    "option",
    "parse_mixers",
    "probe",
    "register_mixer",
]
