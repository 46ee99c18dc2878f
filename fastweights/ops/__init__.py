"""The memory rules as functions on tensors. See docs/rules.md for what each one computes and costs."""

from .delta_rule import delta_rule
from .gated_kalmanet import gated_kalmanet
from .lattice import lattice
from .linear_attention import linear_attention
from .mesa import mesa
from .output_normalized_ttt import output_normalized_ttt
from .palimpsa import palimpsa, palimpsa_posterior
from .precondition import precondition_keys, precondition_queries
from .preconditioned_delta_rule import preconditioned_delta_rule
from .recursive_least_squares import recursive_least_squares
from .variational_linear_attention import variational_linear_attention

__all__ = [
    "delta_rule",
    "gated_kalmanet",
    "lattice",
    "linear_attention",
    "mesa",
    "output_normalized_ttt",
    "palimpsa",
    "palimpsa_posterior",
    "precondition_keys",
    "precondition_queries",
    "preconditioned_delta_rule",
    "recursive_least_squares",
    "variational_linear_attention",
]
