"""Decoding: ops that read a few tokens per sequence and update their state in place."""

from .delta_rules import delta_rule_, linear_attention_, preconditioned_delta_rule_
from .exact import recursive_least_squares_, variational_linear_attention_
from .palimpsa import palimpsa_, palimpsa_posterior_
from .ridge import gated_kalmanet_, mesa_
from .slots import lattice_, output_normalized_ttt_

__all__ = [
    "delta_rule_",
    "gated_kalmanet_",
    "lattice_",
    "linear_attention_",
    "mesa_",
    "output_normalized_ttt_",
    "palimpsa_",
    "palimpsa_posterior_",
    "preconditioned_delta_rule_",
    "recursive_least_squares_",
    "variational_linear_attention_",
]
