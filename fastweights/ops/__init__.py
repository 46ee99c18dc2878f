"""The memory rules as functions on tensors. See docs/rules.md for what each one computes and costs."""

from .delta_rule import delta_rule
from .linear_attention import linear_attention
from .precondition import precondition_keys, precondition_queries
from .preconditioned_delta_rule import preconditioned_delta_rule

__all__ = [
    "delta_rule",
    "linear_attention",
    "precondition_keys",
    "precondition_queries",
    "preconditioned_delta_rule",
]
