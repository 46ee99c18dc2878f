"""Sequence mixers: modules around one memory rule each, and the registry that names them.

A layer of the library is one line here. `name as name` marks a public name for type checkers, which do not read `__all__` below.
"""

import inspect as _inspect
import typing as _typing

from ..plugins import import_mixers as import_mixers
from .blocks import BLOCKS as BLOCKS
from .blocks import in_block as in_block
from .cache import LayerCache as LayerCache
from .choice import MixerChoice as MixerChoice
from .choice import parse_mixers as parse_mixers
from .delta_net import DeltaNet as DeltaNet
from .delta_net import ElementwiseLonghorn as ElementwiseLonghorn
from .delta_product import DeltaProduct as DeltaProduct
from .lattice import Lattice as Lattice
from .lattice import TestTimeTraining as TestTimeTraining
from .least_squares import GatedKalmaNet as GatedKalmaNet
from .least_squares import MesaNet as MesaNet
from .least_squares import RecursiveLeastSquares as RecursiveLeastSquares
from .linear_attention import LinearAttention as LinearAttention
from .memory_layer import MemoryLayer as MemoryLayer
from .memory_layer import RuleCall as RuleCall
from .mixer import Mixer as Mixer
from .options import DecayOptions as DecayOptions
from .options import MemoryOptions as MemoryOptions
from .options import MixerOptions as MixerOptions
from .options import ProjectionOptions as ProjectionOptions
from .options import option as option
from .parts import HeadPart as HeadPart
from .posterior import PalimpsaD as PalimpsaD
from .posterior import PalimpsaM as PalimpsaM
from .probe import Seen as Seen
from .probe import probe as probe
from .registry import MIXERS as MIXERS
from .registry import MixerSpec as MixerSpec
from .registry import build_mixer as build_mixer
from .registry import register_mixer as register_mixer
from .rwkv7 import RWKV7 as RWKV7
from .softmax_attention import SoftmaxAttention as SoftmaxAttention
from .vla import PrintedDeltaNet as PrintedDeltaNet
from .vla import VariationalLinearAttention as VariationalLinearAttention

if not _typing.TYPE_CHECKING:  # what `import *` takes: the names above, and no modules
    __all__ = sorted(name for name, x in globals().items() if not (name.startswith("_") or _inspect.ismodule(x)))
