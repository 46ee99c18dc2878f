"""What a memory rule and a layer of one's own may use. docs/own_rule.md is the guide.

A rule is a declaration (`OpSpec` with `roles`, `State`, `Output`, options and `Case`), a loop over tokens (`sequential`), a form
over chunks of tokens (`chunkwise`, with `Chunks` and `make_decay`), where there are any kernels (`kernels`, `recurrent`), and a
public function under `@op(SPEC)` that passes its arguments to `call`.

A layer calls ops, and what stands around a memory: short convolutions, norms, gates. Functions in pairs, such as `takes_ring` and
`ring_attention`, are kernels for some calls; the first says whether the second serves a call.

Every name is one line here. `name as name` marks a public name for type checkers, which do not read `__all__` below.
"""

import typing as _typing

from ..kernels.runtime.launch_plan import Recorder as Recorder
from ..kernels.runtime.launch_plan import Rule as Rule
from .channel_decay import channel_decay as channel_decay
from .context_parallel.group import ContextParallel as ContextParallel
from .context_parallel.heads import on_heads as on_heads
from .delta_rule import forms as _delta_rule
from .delta_writes import read_keys as read_keys
from .delta_writes import takes_delta_writes as takes_delta_writes
from .delta_writes import write_gain as write_gain
from .framework import roles as roles
from .framework.call import InPlace as InPlace
from .framework.call import Op as Op
from .framework.call import call as call
from .framework.call import op as op
from .framework.checks import Sizes as Sizes
from .framework.checks import compute_dtype as compute_dtype
from .framework.few_tokens import needs_gradient as needs_gradient
from .framework.few_tokens import recurrent as recurrent
from .framework.in_place import check_columns as check_columns
from .framework.in_torch import chunkwise as chunkwise
from .framework.in_torch import composed as composed
from .framework.in_torch import expand_heads as expand_heads
from .framework.in_torch import sequential as sequential
from .framework.in_torch import stack_time as stack_time
from .framework.kernel_backend import KernelFamily as KernelFamily
from .framework.kernel_backend import kernels as kernels
from .framework.passing import Passing as Passing
from .framework.passing import Sum as Sum
from .framework.passing import Transition as Transition
from .framework.pool_rows import read_rows as read_rows
from .framework.pool_rows import write_rows as write_rows
from .framework.sequences import Chunks as Chunks
from .framework.sequences import Sequences as Sequences
from .framework.sequences import check_cu_seqlens as check_cu_seqlens
from .framework.sequences import group_by_length as group_by_length
from .framework.sequences import locate_tokens as locate_tokens
from .framework.sequences import token_positions as token_positions
from .framework.spec import BACKENDS as BACKENDS
from .framework.spec import Case as Case
from .framework.spec import Choice as Choice
from .framework.spec import Flag as Flag
from .framework.spec import Integer as Integer
from .framework.spec import Number as Number
from .framework.spec import OpSpec as OpSpec
from .framework.spec import Output as Output
from .framework.spec import Parameter as Parameter
from .framework.spec import Role as Role
from .framework.spec import State as State
from .framework.spec import count_numbers as count_numbers
from .framework.spec import format_numbers as format_numbers
from .framework.spec import spec_of as spec_of
from .gated_norm import GATES as GATES
from .gated_norm import gated_rms_norm as gated_rms_norm
from .gated_writes import divide_answers as divide_answers
from .gated_writes import gate_both as gate_both
from .gated_writes import gated_writes as gated_writes
from .gated_writes import importance_writes as importance_writes
from .joined_product import add_product_ as add_product_
from .joined_product import joined_product as joined_product
from .joined_product import product_dtype as product_dtype
from .l2_normalize import l2_normalize as l2_normalize
from .layer_norm import layer_norm as layer_norm
from .linear_attention import forms as _linear_attention
from .linear_rows import Normed as Normed
from .linear_rows import Product as Product
from .linear_rows import linear_rows as linear_rows
from .linear_rows import multiply_rows as multiply_rows
from .linear_rows import takes_linear_rows as takes_linear_rows
from .positive_keys import positive_keys as positive_keys
from .positive_keys import takes_positive_keys as takes_positive_keys
from .residual_norm import residual_norm as residual_norm
from .ring_attention import ring_attention as ring_attention
from .ring_attention import takes_ring as takes_ring
from .rwkv7 import erase_keys as erase_keys
from .rwkv7 import read_answers as read_answers
from .rwkv7 import takes_rwkv7 as takes_rwkv7
from .rwkv7 import token_mix as token_mix
from .shared.decay import make_decay as make_decay
from .short_convolution import short_convolution as short_convolution
from .short_convolution.joint import convolve_joint as convolve_joint
from .short_convolution.joint import takes_joint as takes_joint
from .short_convolution.token import TokenConvolution as TokenConvolution
from .short_convolution.token import convolve_token as convolve_token
from .short_convolution.token import takes_token as takes_token
from .step_decay import LARGEST_LOG_RATE as LARGEST_LOG_RATE
from .step_decay import exp_rate as exp_rate
from .step_decay import softplus_above as softplus_above
from .step_decay import step_decay as step_decay
from .step_decay import takes_step_decay as takes_step_decay
from .variational_linear_attention import penalized_memory as penalized_memory

delta_rule_by_chunks = _delta_rule.chunked
linear_attention_by_chunks = _linear_attention.chunked

if not _typing.TYPE_CHECKING:  # what `import *` takes
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
