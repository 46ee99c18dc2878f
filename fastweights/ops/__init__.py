"""The memory rules as functions on tensors. docs/rules.md describes what each one computes and costs.

An op of the library is one line here. `name as name` marks a public name for type checkers, which do not read `__all__` below.
"""

import inspect as _inspect
import typing as _typing

from .delta_product import delta_product as delta_product
from .delta_rule import delta_rule as delta_rule
from .dplr_delta_rule import dplr_delta_rule as dplr_delta_rule
from .elementwise_longhorn import elementwise_longhorn as elementwise_longhorn
from .gated_kalmanet import gated_kalmanet as gated_kalmanet
from .gated_norm import gated_rms_norm as gated_rms_norm
from .gated_writes import gated_writes as gated_writes
from .kalman_filter import kalman_filter as kalman_filter
from .lattice import lattice as lattice
from .linear_attention import linear_attention as linear_attention
from .mesa import mesa as mesa
from .output_normalized_ttt import output_normalized_ttt as output_normalized_ttt
from .palimpsa import palimpsa as palimpsa
from .palimpsa import palimpsa_posterior as palimpsa_posterior
from .precondition import precondition_keys as precondition_keys
from .precondition import precondition_queries as precondition_queries
from .preconditioned_delta_rule import preconditioned_delta_rule as preconditioned_delta_rule
from .recursive_least_squares import recursive_least_squares as recursive_least_squares
from .registry import OPS as OPS
from .registry import register_op as register_op
from .registry import register_own as _register_own
from .short_convolution import short_convolution as short_convolution
from .variational_linear_attention import variational_linear_attention as variational_linear_attention

# The ops that read a few tokens and update their state in place, for decoding.
delta_product_ = delta_product.in_place
delta_rule_ = delta_rule.in_place
dplr_delta_rule_ = dplr_delta_rule.in_place
gated_kalmanet_ = gated_kalmanet.in_place
kalman_filter_ = kalman_filter.in_place
lattice_ = lattice.in_place
linear_attention_ = linear_attention.in_place
mesa_ = mesa.in_place
output_normalized_ttt_ = output_normalized_ttt.in_place
palimpsa_ = palimpsa.in_place
palimpsa_posterior_ = palimpsa_posterior.in_place
preconditioned_delta_rule_ = preconditioned_delta_rule.in_place
recursive_least_squares_ = recursive_least_squares.in_place
variational_linear_attention_ = variational_linear_attention.in_place

_register_own(globals().values())

if not _typing.TYPE_CHECKING:  # what `import *` takes: the names above, and no modules
    __all__ = sorted(name for name, x in globals().items() if not (name.startswith("_") or _inspect.ismodule(x)))
