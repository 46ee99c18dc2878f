"""Short causal convolution along time, one filter per channel, with the activation and norm that usually follow."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels.availability import takes_kernels
from ..context_parallel.agreement import check_on_all_ranks
from ..context_parallel.documents import sequences_of_part
from ..context_parallel.group import as_context_parallel
from ..context_parallel.halo import last_inputs, read_halo
from ..framework.checks import LARGEST_HEAD, check_flag, check_number, check_tensor, shape_of
from ..framework.node import KernelRule, Node, Tensors
from ..framework.sequences import check_cu_seqlens
from .joint import WIDEST
from .torch_form import torch_form

__all__ = ["short_convolution"]


class ShortConvolution(KernelRule):
    """The kernels as a node: (x, weight, bias, window, cu_seqlens), (silu, head, eps, keep) -> y and the last window, which is
    empty unless `keep`."""

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        x, weight, _, _, edges = tensors
        assert x is not None and weight is not None
        count = x.shape[0] if edges is None else edges.shape[0] - 1
        *_, keep = options
        return (x.new_empty(x.shape), x.new_empty((count, weight.shape[1] - 1, x.shape[2]) if keep else 0)), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        x, (dy, dfinal), (*plain, keep) = tensors[0], output_grads, options
        assert x is not None
        dy = x.new_zeros(x.shape) if dy is None else dy
        return *self.load().backward(dy, dfinal if keep else None, *tensors, *plain), None


NODE = Node(
    "short_convolution",
    {"x": False, "weight": False, "bias": True, "window": True, "cu_seqlens": True},
    {"silu": "bool", "head": "int?", "eps": "float", "keep": "bool"},
    outputs=2,
    rule=ShortConvolution("short_convolution"),
)


def check_convolution(
    x: Any, weight: Any, bias: Any, activation: Any, normalize: Any, eps: Any, initial_state: Any, output_final_state: Any,
    cu_seqlens: Any, backend: Any, parts: int = 1,
) -> bool:  # fmt: skip
    """Whether the kernels serve arguments that are right. parts: number of processes that a sequence is divided over."""
    check_tensor("x", x)
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError(f"x must be [B, T, D], got shape {shape_of(x)}")
    channels = x.shape[2]
    check_tensor("weight", weight, x)
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"weight must be [{channels}, W] with W >= 1, got shape {shape_of(weight)}")
    if bias is not None and check_tensor("bias", bias, x).shape != (channels,):
        raise ValueError(f"bias must be [{channels}], got shape {shape_of(bias)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    if normalize is not None and (
        isinstance(normalize, bool) or not isinstance(normalize, int) or not 1 <= normalize <= LARGEST_HEAD
        or channels % normalize
    ):  # fmt: skip
        raise ValueError(
            f"normalize must be the width of a head, a divisor of {channels} up to {LARGEST_HEAD}, or None, got {normalize!r}"
        )
    check_number("eps", eps, low=0.0)
    check_flag("output_final_state", output_final_state)
    width, count = weight.shape[1], check_cu_seqlens(cu_seqlens, len(x), parts * x.shape[1], like=x).count
    if initial_state is not None:
        check_tensor("initial_state", initial_state, x)
        if initial_state.shape != (count, width - 1, channels):
            raise ValueError(
                f"initial_state must be [{count}, {width - 1}, {channels}], got shape {shape_of(initial_state)}; "
                "pass a call's final state"
            )
    by_kernels = takes_kernels(backend, x)
    if by_kernels and backend == "triton" and width > WIDEST:
        raise ValueError(f"backend 'triton' takes filters up to {WIDEST} wide, got {width}; use 'torch' or 'auto'")
    if parts > 1 and x.shape[1] < width - 1:
        raise ValueError(
            f"x must have at least W-1 = {width - 1} tokens on each process with cp_group, got {x.shape[1]}; use fewer "
            "processes or longer sequences"
        )
    return by_kernels and width <= WIDEST


ARGUMENTS = tuple(inspect.signature(check_convolution).parameters)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    normalize: int | None = None,
    eps: float = 1e-6,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    cp_group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Each channel of a token as a weighted sum of its last W values, then an activation and a norm of each head.

    $$c_t = \sum_{j=0}^{W-1} w_j\, x_{t-W+1+j} + b, \qquad s_t = \mathrm{silu}(c_t), \qquad
      y_t = s_t / \sqrt{|s_t|^2 + \mathrm{eps}}$$

    The convolution in front of memory layers since H3 (Fu et al. 2023) and Mamba (Gu and Dao 2023). On CUDA with triton installed
    one kernel computes all of it in float32, and another its gradients from x alone; a second derivative needs backend "torch".

    Args:
        x: [B, T, D], float16, bfloat16, float32 or float64. A slice along D, such as a part of a joint projection, is read
            where it lies.
        weight: w, [D, W]. Any float dtype.
        bias: b, [D]; none when None.
        activation: "silu", or None for s = c.
        normalize: number of channels of a head, a divisor of D up to 256: each head is scaled to length 1. None for y = s.
        eps: at least 0, added to the squared length.
        initial_state: the W-1 inputs before the first token, [N, W-1, D]; zeros when None. N is B, or the number of packed
            sequences.
        output_final_state: whether to return the last W-1 inputs.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1). The sequences do not
            see each other. Its values are checked on a CPU, and on a GPU only with FASTWEIGHTS_CHECK_VALUES=1.
        backend: "torch", "triton" (not in float64; W up to 8) or "auto": "triton" on CUDA where it serves, else "torch".
        cp_group: where one sequence is divided over several processes, as for the memory rules: x and y are this process's part
            of at least W-1 tokens, all else is of whole sequences. Each process sends its last W-1 inputs to the next one.

    Returns:
        y [B, T, D] in x's dtype, and the last W-1 inputs [N, W-1, D] in the same dtype, or None.

    Raises:
        ValueError: a shape, dtype, device, option or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    given = x, weight, bias, activation, normalize, eps, initial_state, output_final_state, cu_seqlens, backend
    cp = as_context_parallel(cp_group)
    if cp is None:
        by_kernels = check_convolution(*given)
    else:
        named = dict(zip(ARGUMENTS, given))
        by_kernels = check_on_all_ranks(cp, lambda: check_convolution(*given, parts=cp.size), named)
    width, silu = weight.shape[1], activation is not None
    window = None if initial_state is None else initial_state.to(x.dtype)
    edges = None if cu_seqlens is None else cu_seqlens.to(x.device)
    final = None
    if cp is not None:
        sequences = sequences_of_part(cp, cu_seqlens, x.shape[1], x.device)
        if width > 1 and output_final_state:
            final = last_inputs(x, width - 1, window, edges, cp)
        if width > 1:
            window = read_halo(x, width - 1, window, sequences)
        edges = None if sequences.cu_seqlens is None else sequences.cu_seqlens.to(x.device)
    if by_kernels:
        keep = output_final_state and final is None
        y, last = NODE((x, weight, bias, window, edges), (silu, normalize, eps, keep))
    else:
        y, last = torch_form(x, weight, bias, window, edges, silu, normalize, eps)
    return y, (last if final is None else final) if output_final_state else None
