"""Models that vLLM has by itself, with their delta rule on our ops: the gated delta nets of Qwen3-Next, Qwen3.5 and OLMo hybrids,
and Kimi Delta Attention. vLLM builds our subclass of its layer in the layer's place. States lie in vLLM's own layout, so that all
else, such as its prefix cache, works as before."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import LARGEST_HEAD
from ...cuda_graphs import is_capturing
from ...kernels.availability import takes_kernels
from ...ops import delta_rule, delta_rule_
from ...ops.authoring import (
    TokenConvolution,
    convolve_token,
    exp_rate,
    l2_normalize,
    read_rows,
    takes_step_decay,
    takes_token,
    write_rows,
)
from ...ops.short_convolution.heads import convolve_heads
from ...ops.step_decay import gain_decay
from .versions import kimi_inputs

__all__ = ["Places", "channel_decay", "head_gates", "read_tokens", "register_layers"]

LAYERS = {  # by vLLM's module: its class, and the method in which a layer reads a step
    "qwen_gdn_linear_attn": ("QwenGatedDeltaNetAttention", "_forward_core"),
    "olmo_gdn_linear_attn": ("OlmoHybridGatedDeltaNetAttention", "_forward_core"),
    "kimi_gdn_linear_attn": ("KimiGatedDeltaNetAttention", "_forward"),
}
REHEARSED = 70  # tokens, more than a chunk has
PLACES = "fastweights_places"  # of prompts, an attribute of a step


class Places(NamedTuple):
    """Where the sequences of a step are: for all layers the same.

    Attributes:
        rows: [N], each sequence's row in the pools without row 0, which belongs to no sequence: vLLM gives it to the padding of
            a step, whose answers mean nothing, and it stays as it is. Padding has row -1.
        known: [N], the same for sequences that have states, and -1 for others.
        edges: [N+1], where the sequences begin in one row of tokens. None for one token each of sequences that all have states.
    """

    rows: Tensor
    known: Tensor
    edges: Tensor | None

    @classmethod
    def find(cls, rows: Tensor, edges: Tensor | None = None, started: Tensor | None = None) -> Places:
        """rows: [N], of vLLM's pools. started: [N], which sequences have states; None for one token each."""
        rows = rows - 1  # for our ops a negative row is none
        return cls(rows, rows if started is None else rows.where(started, -1), edges)


def read_tokens(
    x_BTC: Tensor, beta_BTH: Tensor, g: Tensor, filters_CW: Tensor, windows: Tensor, states: Tensor, places: Places
) -> Tensor:
    """The answers o [B, T, HV, V] of a layer to tokens, whose states are brought up to date in vLLM's pools.

    Args:
        x_BTC: queries, keys and values of all heads side by side, before the convolution. B = N for one token each, else 1.
        beta_BTH: gains.
        g: log decays, [B, T, HV] or [B, T, HV, K].
        filters_CW: of the convolution.
        windows: [P, W-1, C], its last inputs.
        states: [P, HV, V, K], values first.
        places: of the sequences.
    """
    windows, states = windows[1:], states[1:].mT
    heads, width, value = states.shape[1:]
    rows, known, edges = places
    keys = (x_BTC.shape[2] - heads * value) // 2
    part = TokenConvolution(x_BTC, filters_CW, None, windows, None)
    if edges is None and takes_token([part], rows=rows):
        (y_BTC,), _ = convolve_token([part], True, rows=rows)
        qk_BTC, v_BTC = y_BTC.split((2 * keys, heads * value), 2)
        q_BTGK, k_BTGK = l2_normalize(qk_BTC.unflatten(2, (-1, width))).chunk(2, 2)
    else:
        before = read_rows(windows, known)
        q_BTC, k_BTC, v_BTC, last = convolve_heads(x_BTC, filters_CW, keys, width, before, edges)
        write_rows(windows, last, rows)
        q_BTGK, k_BTGK = (x.unflatten(2, (-1, width)) for x in (q_BTC, k_BTC))
    given = q_BTGK, k_BTGK, v_BTC.unflatten(2, (heads, value)), beta_BTH, g
    if edges is None and states.dtype == torch.float32:
        return delta_rule_(*given, state=states, state_indices=rows)
    first = read_rows(states, known, torch.float32)
    o_BTHV, final = delta_rule(*given, initial_state=first, output_final_state=True, cu_seqlens=edges)
    assert final is not None
    write_rows(states, final, rows)
    return o_BTHV


def head_gates(
    gain_BTH: Tensor, step_BTH: Tensor, bias_H: Tensor, A_log_H: Tensor, largest: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gates of a gated delta net [B, T, H] in float32: beta = largest sigmoid(gain), g = -exp(A_log) softplus(step + bias)."""
    if takes_step_decay(step_BTH, bias_H, A_log_H):
        return gain_decay(gain_BTH, step_BTH, bias_H, A_log_H, largest)
    return largest * gain_BTH.float().sigmoid(), -exp_rate(A_log_H) * F.softplus(step_BTH.float() + bias_H.float())


def channel_decay(step_BTHK: Tensor, bias: Tensor, A_log: Tensor, lowest: float | None = None) -> Tensor:
    """g [B, T, H, K] of Kimi Delta Attention in float32: as in `head_gates`, with a bias per channel. With a lowest decay it is
    lowest sigmoid(exp(A_log) (step + bias))."""
    heads = step_BTHK.shape[2]
    step, rate_H1 = step_BTHK.float() + bias.float().view(heads, -1), exp_rate(A_log).view(heads, 1)
    return -rate_H1 * F.softplus(step) if lowest is None else lowest * torch.sigmoid(rate_H1 * step)


# What follows is called by vLLM, and imports it where it is needed.


def read_step(layer: Any, tokens: tuple[Tensor, Tensor, Tensor], filters_CW: Tensor, o_THV: Tensor) -> None:
    """Write the answers to the tokens of a step into o: those of sequences that go on by one token, then those of prompts. What
    follows them is padding.

    Args:
        tokens: x [T, C], beta [T, HV] and g [T, HV] or [T, HV, K] of `read_tokens`.
    """
    from vllm.forward_context import get_forward_context

    steps = get_forward_context().attn_metadata
    step = None if steps is None else steps.get(layer.prefix)
    if step is None:
        return rehearse(layer, tokens, filters_CW)
    pools = filters_CW, *orient(*layer.kv_cache)
    ones = step.num_decode_tokens
    if ones:  # under a CUDA graph for more sequences, with rows of padding
        x, beta, g = (t[:ones, None] for t in tokens)
        o_THV[:ones] = read_tokens(x, beta, g, *pools, Places.find(step.non_spec_state_indices_tensor[:ones]))[:, 0]
    if step.num_prefills:
        some = slice(ones, ones + step.num_prefill_tokens)
        x, beta, g = (t[None, some] for t in tokens)
        o_THV[some] = read_tokens(x, beta, g, *pools, places_of_prompts(step))[0]


def places_of_prompts(step: Any) -> Places:
    """The first layer computes them for all layers. A graph that is captured computes them in each: replays would read what was
    computed before the capture. So does a copy of this object for other rows."""
    rows, ones = step.non_spec_state_indices_tensor, step.num_decode_tokens
    kept = getattr(step, PLACES, None)
    if kept is not None and kept[0] is rows and not is_capturing():
        return kept[1]
    own, edges = slice(ones, ones + step.num_prefills), step.non_spec_query_start_loc
    edges = edges[own.start : own.stop + 1] - ones
    places = Places.find(rows[own], edges, step.has_initial_state[own])
    setattr(step, PLACES, (rows, places))
    return places


def orient(windows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Pools of a layer with windows [P, W-1, C]. VLLM_SSM_CONV_STATE_LAYOUT may turn them."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return windows.mT if is_conv_state_dim_first() else windows, states


def rehearse(layer: Any, tokens: tuple[Tensor, Tensor, Tensor], filters_CW: Tensor) -> None:
    """Each kind of call on padding, while vLLM measures memory, so that its kernels are compiled before the first request."""
    x, beta, g = (t[:1, None] for t in tokens)
    kinds = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
    windows, states = (x.new_zeros(2, *shape, dtype=dtype) for shape, dtype in kinds)
    pools = filters_CW, *orient(windows, states)
    row = torch.zeros(1, dtype=torch.int32, device=x.device)
    edges = torch.tensor([0, REHEARSED], dtype=torch.int32, device=x.device)
    read_tokens(x, beta, g, *pools, Places.find(row))
    x, beta, g = (t.expand(1, REHEARSED, *t.shape[2:]) for t in (x, beta, g))
    read_tokens(x, beta, g, *pools, Places.find(row, edges, row > 0))


def explain_refusal(layer: Any) -> str | None:
    """Why a layer of vLLM stays on vLLM's own kernels, None where it runs on ours."""
    widths = layer.get_state_shape()[1][1:]
    if layer.num_spec:
        return "speculative decoding must be off"
    if layer.A_log.device.type != "cpu" and not takes_kernels("auto", layer.A_log):
        return "it must run on a CPU or on a GPU of our kernels"
    if max(widths) > LARGEST_HEAD:
        return f"heads must have at most {LARGEST_HEAD} channels, got {max(widths)}"
    if layer.activation not in ("silu", "swish"):
        return f"the activation behind the convolution must be silu, got {layer.activation}"
    return None


def prepare(layer: Any) -> bool:
    """Whether a layer that vLLM has just built runs on our ops, which the log says."""
    from vllm.platforms import current_platform

    refusal, kind = explain_refusal(layer), type(layer).__name__
    if refusal is not None:
        logger().warning_once("%s stays on vLLM's own kernels: %s.", kind, refusal)
        return False
    logger().info_once("%s runs on the kernels of fastweights.", kind)
    if current_platform.is_cpu():
        for name, module in layer.named_children():
            if name.endswith("conv1d"):
                module.quant_method = None  # vLLM would pack the filters for its own op
    return True


def make_gated_delta_net(original: Any) -> type:
    """A subclass of vLLM's layer of Qwen or OLMo hybrids. Both read a step in a method with these arguments."""

    class GatedDeltaNet(original):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.runs_on_ours = prepare(self)

        def forward_cpu(self, *given: Any) -> Any:
            """Qwen's layer calls its own op on a CPU, and the method below otherwise."""
            return self.forward_cuda(*given) if self.runs_on_ours else super().forward_cpu(*given)

        def get_prefill_checkpoint_alignment(self) -> int | None:
            """Since 0.33 vLLM's prefill by FlashInfer also writes the state in the middle of a prompt that prefix caching keeps.
            Ours writes the last one only: None has vLLM end a piece of the prompt there."""
            return None if self.runs_on_ours else super().get_prefill_checkpoint_alignment()

        def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            if not self.runs_on_ours:
                return super()._forward_core(mixed_qkv, b, a, core_attn_out)
            largest = 2.0 if getattr(self, "allow_neg_eigval", False) else 1.0
            beta_1TH, g_1TH = head_gates(b[None], a[None], self.dt_bias, self.A_log, largest)
            read_step(self, (mixed_qkv, beta_1TH[0], g_1TH[0]), self.conv1d.weight.flatten(1), core_attn_out)

    return GatedDeltaNet


def make_kimi_delta_attention(original: Any) -> type:
    """A subclass of vLLM's layer of Kimi-Linear, whose method has other arguments in some versions."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    class KimiDeltaAttention(original):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.runs_on_ours = prepare(self)

        @eager_break_during_capture
        def _forward(self, *, core_attn_out: Tensor, g1: Tensor, **rest: Any) -> None:
            if not self.runs_on_ours:
                return super()._forward(core_attn_out=core_attn_out, g1=g1, **rest)
            x_TC, beta_TH, filters_CW = kimi_inputs(self, rest)
            g_THK = channel_decay(g1, self.dt_bias, self.A_log, getattr(self, "gate_lower_bound", None))[0]
            read_step(self, (x_TC, beta_TH, g_THK), filters_CW, core_attn_out[0])
            if "g2" in rest:
                core_attn_out.copy_(self.o_norm(core_attn_out, rest["g2"]))

    return KimiDeltaAttention


def register_layers() -> None:
    """Have vLLM build our subclasses. A layer that this version lacks, or that another plug-in replaces, stays as it is."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.platforms import current_platform

    for path, (name, method) in LAYERS.items():
        make = make_kimi_delta_attention if method == "_forward" else make_gated_delta_net
        try:
            module: Any = import_module(f"vllm.model_executor.layers.mamba.gdn.{path}")
        except ImportError:
            module = None
        original: Any = getattr(module, name, None)
        if current_platform.is_cpu() and hasattr(module, "set_triton_allocator"):
            module.set_triton_allocator = lambda device: None  # OLMo's layer asks Triton for memory, which is not there
        if not hasattr(original, method) or not issubclass(original, PluggableLayer):
            logger().warning("this version of vLLM has no %s.%s: such layers stay on vLLM's own kernels.", name, method)
        elif name not in op_registry_oot:
            ours = make(original)
            ours.__name__ = ours.__qualname__ = name
            PluggableLayer.register_oot(name=name)(ours)
        elif op_registry_oot[name].__module__ != __name__:
            logger().warning("%s is replaced by another plug-in, and stays so.", name)


def logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(f"vllm.plugins.{__name__}")  # vLLM prints what loggers below its own say
