"""What a memory rule and a layer of one's own may use. docs/own_rule.md is the guide.

A rule is a declaration (`OpSpec` with `roles`, `State`, `Output`, options and `Case`), a loop over tokens (`sequential`), a form
over chunks of tokens (`chunkwise`, with `Chunks` and `make_decay`), where there are any kernels (`kernels`, `recurrent`), and a
public function under `@op(SPEC)` that passes its arguments to `call`.

A layer calls ops, and what stands around a memory: short convolutions, norms, gates. Functions in pairs, such as `takes_ring` and
`ring_attention`, are kernels for some calls; the first says whether the second serves a call.
"""

from ..kernels.runtime.launch_plan import Recorder, Rule
from .delta_rule.chunked import chunked as delta_rule_by_chunks
from .framework import roles
from .framework.call import InPlace, Op, call, op
from .framework.checks import Sizes, compute_dtype
from .framework.few_tokens import needs_gradient, recurrent
from .framework.in_place import read_rows, write_rows
from .framework.in_torch import chunkwise, composed, expand_heads, sequential, stack_time
from .framework.kernel_backend import KernelFamily, kernels
from .framework.sequences import Chunks, Sequences, check_cu_seqlens, group_by_length, locate_tokens, token_positions
from .framework.spec import (
    BACKENDS,
    Case,
    Choice,
    Flag,
    Integer,
    Number,
    OpSpec,
    Output,
    Parameter,
    Role,
    State,
    count_numbers,
    format_numbers,
    spec_of,
)
from .gated_norm import GATES, gated_rms_norm
from .gated_writes import gated_writes
from .l2_normalize import l2_normalize
from .linear_attention.chunked import chunked as linear_attention_by_chunks
from .linear_rows import linear_rows, takes_linear_rows
from .residual_norm import residual_norm
from .ring_attention import ring_attention, takes_ring
from .shared.decay import make_decay
from .short_convolution import short_convolution
from .short_convolution.token import TokenConvolution, convolve_token, takes_token
from .step_decay import LARGEST_LOG_RATE, exp_rate, step_decay, takes_step_decay
from .variational_linear_attention import penalized_memory

__all__ = [
    "BACKENDS",
    "GATES",
    "LARGEST_LOG_RATE",
    "Case",
    "Choice",
    "Chunks",
    "Flag",
    "InPlace",
    "Integer",
    "KernelFamily",
    "Number",
    "Op",
    "OpSpec",
    "Output",
    "Parameter",
    "Recorder",
    "Role",
    "Rule",
    "Sequences",
    "Sizes",
    "State",
    "TokenConvolution",
    "call",
    "check_cu_seqlens",
    "chunkwise",
    "composed",
    "compute_dtype",
    "convolve_token",
    "count_numbers",
    "make_decay",
    "delta_rule_by_chunks",
    "exp_rate",
    "expand_heads",
    "format_numbers",
    "read_rows",
    "gated_rms_norm",
    "gated_writes",
    "group_by_length",
    "write_rows",
    "kernels",
    "l2_normalize",
    "linear_attention_by_chunks",
    "linear_rows",
    "locate_tokens",
    "needs_gradient",
    "op",
    "penalized_memory",
    "recurrent",
    "residual_norm",
    "ring_attention",
    "roles",
    "sequential",
    "short_convolution",
    "spec_of",
    "stack_time",
    "step_decay",
    "takes_linear_rows",
    "takes_ring",
    "takes_step_decay",
    "takes_token",
    "token_positions",
]
