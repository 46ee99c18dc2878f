"""From the hidden state to queries, keys and values, and from the memory's answer back: what every memory layer shares."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import check_choice, check_flag, check_positive, check_size
from .convolution import ShortConvolution
from .heads import HeadSizes
from .initialization import OwnInitialValues, ResidualProjection
from .norms import RMSNorm

__all__ = ["GATES", "OutputProjection", "QKVProjection", "SharedQKProjection", "ValueSkip"]

ACTIVATIONS = {"silu": F.silu, "none": lambda x: x}
GATES = {"silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu}


class QKVProjection(nn.Module):
    """q, k, v = activation(convolution(projection(x))), each split into heads.

    Args:
        conv_size: width of the causal depthwise convolution, None for none.
        activation: "silu" or "none".
    """

    def __init__(self, hidden_size: int, heads: HeadSizes, conv_size: int | None, activation: str) -> None:
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        if conv_size is not None:
            check_size("conv_size", conv_size)
        self.activation = activation
        self.widths = {"q": heads.key, "k": heads.key, "v": heads.value}
        counts = {"q": heads.key_heads, "k": heads.key_heads, "v": heads.value_heads}
        for name, width in self.widths.items():
            channels = counts[name] * width
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, channels, bias=False))
            if conv_size is not None:
                self.add_module(f"{name}_conv", ShortConvolution(channels, conv_size))
        self.has_convolution = conv_size is not None

    def forward(
        self, x_BTD: Tensor, windows: Mapping[str, Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k [B, T, H, K], v [B, T, G, V], and the windows [N, W-1, channels] by name to go on from."""
        heads, new_windows = [], {}
        for name, width in self.widths.items():
            y = self.get_submodule(f"{name}_proj")(x_BTD)
            if self.has_convolution:
                y, new_windows[name] = self.get_submodule(f"{name}_conv")(y, windows.get(name), cu_seqlens)
            heads.append(ACTIVATIONS[self.activation](y).unflatten(2, (-1, width)))
        return heads[0], heads[1], heads[2], new_windows


class SharedQKProjection(nn.Module):
    """q and k = activation(a convolution each(one projection(x))), v = projection(x): the block of Lattice.

    Args:
        conv_size: width of the convolutions, which alone tell q from k.
        activation: after them, "silu" or "none".
    """

    def __init__(self, hidden_size: int, heads: HeadSizes, conv_size: int, activation: str) -> None:
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_size("conv_size", conv_size)
        self.activation = activation
        self.heads = heads
        channels = heads.key_heads * heads.key
        self.qk_proj = nn.Linear(hidden_size, channels, bias=False)
        self.v_proj = nn.Linear(hidden_size, heads.value_heads * heads.value, bias=False)
        self.q_conv = ShortConvolution(channels, conv_size)
        self.k_conv = ShortConvolution(channels, conv_size)

    def forward(
        self, x_BTD: Tensor, windows: Mapping[str, Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k [B, T, H, K], v [B, T, G, V], and the window [N, W-1, channels] that both convolutions go on from."""
        y = self.qk_proj(x_BTD)
        q, window = self.q_conv(y, windows.get("qk"), cu_seqlens)
        k, _ = self.k_conv(y, windows.get("qk"), cu_seqlens)
        q, k = (ACTIVATIONS[self.activation](z).unflatten(2, (-1, self.heads.key)) for z in (q, k))
        return q, k, self.v_proj(x_BTD).unflatten(2, (-1, self.heads.value)), {"qk": window}


class ValueSkip(OwnInitialValues):
    """o + D v with a number D a head, 1 at first: lets a token's own value past the memory (Mamba-2)."""

    _no_weight_decay = ("D",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"D": torch.ones_like(self.D)}

    def forward(self, o_BTGV: Tensor, v_BTGV: Tensor) -> Tensor:
        return o_BTGV + self.D[:, None].to(v_BTGV.dtype) * v_BTGV


class OutputProjection(nn.Module):
    """y = W_o [RMSNorm(o) * gate(x)], the norm taken over each head apart.

    Args:
        gate: None, "silu", "sigmoid" or "gelu".
        gate_low_rank: whether the gate's projection goes through one head's width (Kimi Linear) instead of a full matrix.
    """

    def __init__(
        self, hidden_size: int, heads: HeadSizes, gate: str | None, gate_low_rank: bool, norm_eps: float
    ) -> None:
        super().__init__()
        check_choice("output_gate", gate, (None, *GATES))
        check_flag("gate_low_rank", gate_low_rank)
        channels = heads.value_heads * heads.value
        self.gate = gate
        if gate is not None:
            self.g_proj: nn.Module = (
                nn.Sequential(
                    nn.Linear(hidden_size, heads.value, bias=False), nn.Linear(heads.value, channels, bias=True)
                )
                if gate_low_rank
                else nn.Linear(hidden_size, channels, bias=False)
            )
        self.norm = RMSNorm(heads.value, eps=check_positive("norm_eps", norm_eps))
        self.o_proj = ResidualProjection(channels, hidden_size)

    def forward(self, o_BTGV: Tensor, x_BTD: Tensor) -> Tensor:
        o = self.norm(o_BTGV).flatten(2)
        if self.gate is not None:
            o = o * GATES[self.gate](self.g_proj(x_BTD))
        return self.o_proj(o)
