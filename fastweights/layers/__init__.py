"""Sequence mixers: modules around one memory rule each, and the registry that names them."""

from ..plugins import import_mixers
from .cache import LayerCache
from .choice import MixerChoice, parse_mixers
from .delta_net import DeltaNet, ElementwiseLonghorn
from .delta_product import DeltaProduct
from .lattice import Lattice, TestTimeTraining
from .least_squares import GatedKalmaNet, MesaNet, RecursiveLeastSquares
from .linear_attention import LinearAttention
from .memory_layer import MemoryLayer, RuleCall
from .mixer import Mixer
from .options import DecayOptions, MemoryOptions, MixerOptions, ProjectionOptions, option
from .posterior import PalimpsaD, PalimpsaM
from .probe import Seen, probe
from .registry import MIXERS, MixerSpec, build_mixer, register_mixer
from .rwkv7 import RWKV7
from .softmax_attention import SoftmaxAttention
from .vla import PrintedDeltaNet, VariationalLinearAttention

__all__ = [
    "MIXERS",
    "RWKV7",
    "DecayOptions",
    "DeltaNet",
    "DeltaProduct",
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
