"""The memory rules as functions on tensors. docs/rules.md describes what each one computes and costs."""

from .delta_product import delta_product
from .delta_rule import delta_rule
from .dplr_delta_rule import dplr_delta_rule
from .elementwise_longhorn import elementwise_longhorn
from .gated_kalmanet import gated_kalmanet
from .gated_norm import gated_rms_norm as gated_rms_norm
from .gated_writes import gated_writes as gated_writes
from .kalman_filter import kalman_filter
from .lattice import lattice
from .linear_attention import linear_attention
from .mesa import mesa
from .output_normalized_ttt import output_normalized_ttt
from .palimpsa import palimpsa, palimpsa_posterior
from .precondition import precondition_keys, precondition_queries
from .preconditioned_delta_rule import preconditioned_delta_rule
from .recursive_least_squares import recursive_least_squares
from .registry import OPS as OPS
from .registry import register_op as register_op
from .registry import register_own
from .short_convolution import short_convolution as short_convolution
from .variational_linear_attention import variational_linear_attention

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

__all__ = [
    "delta_product",
    "delta_product_",
    "delta_rule",
    "delta_rule_",
    "dplr_delta_rule",
    "dplr_delta_rule_",
    "elementwise_longhorn",
    "gated_kalmanet",
    "gated_kalmanet_",
    "kalman_filter",
    "kalman_filter_",
    "lattice",
    "lattice_",
    "linear_attention",
    "linear_attention_",
    "mesa",
    "mesa_",
    "output_normalized_ttt",
    "output_normalized_ttt_",
    "palimpsa",
    "palimpsa_",
    "palimpsa_posterior",
    "palimpsa_posterior_",
    "precondition_keys",
    "precondition_queries",
    "preconditioned_delta_rule",
    "preconditioned_delta_rule_",
    "recursive_least_squares",
    "recursive_least_squares_",
    "variational_linear_attention",
    "variational_linear_attention_",
]

register_own({name: globals()[name] for name in __all__ if not name.endswith("_")})
