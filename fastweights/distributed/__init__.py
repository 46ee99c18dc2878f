"""One sequence over several processes: context parallelism of models and layers."""

from ..ops.context_parallel.group import ContextParallel
from .parallel import context_parallel, whole_sequences
from .tokens import gather_tokens, own_tokens, sum_over_ranks

__all__ = ["ContextParallel", "context_parallel", "gather_tokens", "own_tokens", "sum_over_ranks", "whole_sequences"]
