"""Projections from the hidden state to queries, keys and values, with short convolutions, and from the memory's answer back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_size
from ..ops.authoring import (
    GATES,
    ContextParallel,
    TokenConvolution,
    convolve_joint,
    convolve_token,
    multiply_rows,
    needs_gradient,
    read_rows,
    short_convolution,
    takes_joint,
    takes_linear_rows,
    takes_token,
    write_rows,
)
from .cache import LayerCache
from .heads import HeadSizes
from .initialization import OwnInitialMatrices, OwnInitialValues, ResidualProjection
from .norms import GatedRMSNorm, l2_normalize
from .shared_input import (
    InputProducts,
    Products,
    find_first_part,
    is_plain,
    joins_norm,
    plain_products,
    project,
    project_jointly,
    project_together,
    project_trained,
    trains_jointly,
)
from .wrapped import is_bare

__all__ = [
    "FIRST_FILTERS",
    "GATES",
    "OutputProjection",
    "QKVProjection",
    "SharedQKProjection",
    "ShortConvolution",
    "ValueSkip",
    "choose_layer_backend",
    "convolve_together",
]

FIRST_FILTERS = ("uniform", "normal")
ACTIVATIONS = {"silu": "silu", "none": None}
COLUMNS = 64  # torch.compile fills rows up to a multiple of so many numbers of 16 bits, and copies them where an op reads them


class ShortConvolution(OwnInitialMatrices):
    """y_t = sum_j w_j x_(t-W+1+j) for each channel by itself, over the last W tokens of the same sequence.

    Args:
        channels: D.
        width: W, number of tokens that a token sees, itself included.
        bias: whether one learned number per channel, zero at first, is added.
        first_filters: "uniform" in +-1/sqrt(W), as torch's own convolutions, or "normal", as flash-linear-attention draws
            every matrix of a model.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False, first_filters: str = "uniform") -> None:
        super().__init__()
        check_size("channels", channels)
        check_size("width", width)
        self.width = width
        self.first_filters = first_filters
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def initial_values(self, std: float = 0.02) -> dict[str, Tensor]:
        weight = torch.empty_like(self.weight, dtype=torch.float32)
        if self.first_filters == "normal":
            weight.normal_(std=std)
        else:
            weight.uniform_(-(self.width**-0.5), self.width**-0.5)
        values = {"weight": weight}
        return values if self.bias is None else {**values, "bias": torch.zeros_like(self.bias)}

    def forward(
        self,
        x_BTD: Tensor,
        conv_state_NWD: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        activation: str | None = None,
        normalize: int | None = None,
        output_final_state: bool = True,
        backend: str = "auto",
        cp_group: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve sequences, then apply the activation and the norm of heads of `normalize` channels.

        conv_state_NWD holds the W-1 inputs before those in x, zeros when None. Returns y [B, T, D] and the last W-1 inputs
        [N, W-1, D] of each sequence for the next call, None where `output_final_state` is False. cp_group: of the mixer.
        """
        return short_convolution(
            x_BTD, self.weight, self.bias, activation=activation, normalize=normalize, initial_state=conv_state_NWD,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, backend=backend, cp_group=cp_group,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, width={self.width}"


def convolve_together(
    convolutions: Sequence[Any],
    inputs: Sequence[Tensor],
    windows: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    *,
    norms: Sequence[int | None],
    activation: str | None,
    keep: bool,
    backend: str,
    rows: Tensor | None = None,
    cp_group: ContextParallel | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """What up to three `ShortConvolution` give for their inputs [B, T, D], and with `keep` the last inputs of each for the next
    call, else None. One kernel serves them where there is one token per sequence, or rows for the windows after each of a few.
    Convolutions with one window must have one input. rows: as in `LayerCache`; the windows are then pools and are brought up to
    date. cp_group: of the mixer."""
    keeps_each = rows is not None and rows.ndim == 2
    if rows is not None:
        parameters = [given for one in convolutions for given in one.parameters()]
        if needs_gradient({str(i): x for i, x in enumerate([*inputs, *parameters])}):
            raise ValueError(
                "a cache with rows of a pool must be used under torch.no_grad(), as its states are overwritten; use one without "
                "rows for gradients"
            )
    joined = keep and (cu_seqlens is None or keeps_each) and all(is_bare(one, ShortConvolution) for one in convolutions)
    if joined and all(window is not None for window in windows):
        parts = [
            TokenConvolution(x, one.weight, one.bias, window, norm)
            for x, one, window, norm in zip(inputs, convolutions, windows, norms, strict=True)
            if window is not None
        ]
        if takes_token(parts, backend, rows):
            made, after = convolve_token(parts, activation is not None, rows=rows, cu_seqlens=cu_seqlens)
            return made, list(after)
    if rows is not None:
        before = [read_rows(pool, rows) for pool in windows if pool is not None]
        made, states = convolve_together(
            convolutions, inputs, before, cu_seqlens, norms=norms, activation=activation, keep=True, backend=backend
        )
        for pool, window, state, x in zip(windows, before, states, inputs, strict=True):
            if pool is not None and state is not None:
                if keeps_each:
                    write_each_window(pool, window, x, rows, cu_seqlens)
                else:
                    write_rows(pool, state, rows)
        return made, list(windows)
    results = [
        one(
            x, window, cu_seqlens, activation=activation, normalize=norm, output_final_state=keep, backend=backend,
            cp_group=cp_group,
        )
        for x, one, window, norm in zip(inputs, convolutions, windows, norms, strict=True)
    ]  # fmt: skip
    return [y for y, _ in results], [state for _, state in results]


def write_each_window(pool: Tensor, window_NWD: Tensor, x_BTD: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> None:
    """Write the last inputs after token t of sequence n into row rows[n, 1 + t] of the pool. window_NWD: those before."""
    (count, columns), kept, device = rows.shape, window_NWD.shape[1], x_BTD.device
    edges = torch.arange(count + 1, device=device) * x_BTD.shape[1] if cu_seqlens is None else cu_seqlens.to(device)
    inputs = torch.cat([window_NWD.flatten(0, 1), x_BTD.flatten(0, 1)])
    token_S, sequence_N = torch.arange(columns - 1, device=device), torch.arange(count, device=device)
    # In the window and the tokens of a sequence together.
    place_SW = token_S[:, None] + 1 + torch.arange(kept, device=device)
    in_window, in_tokens = sequence_N[:, None, None] * kept + place_SW, edges[:-1, None, None] + place_SW - kept
    at_NSW = in_window.where(place_SW < kept, count * kept + in_tokens).clamp_max(len(inputs) - 1)
    has_row = (rows[:, :1] >= 0) & (token_S < edges.diff()[:, None])
    write_rows(pool, inputs[at_NSW].flatten(0, 1), rows[:, 1:].where(has_row, -1).flatten())


def choose_layer_backend(backend: str) -> str:
    """The backend of convolutions and norms in a layer whose memory has this one."""
    return "torch" if backend == "reference" else backend


class QKVProjection(nn.Module):
    """q, k, v = activation(convolution(projection(x))), each split into heads, those of q and k brought to length 1.

    Args:
        conv_size: width of the causal depthwise convolution, None for none.
        activation: "silu" or "none".
        normalize_qk: whether q and k are divided by their length.
        backend: of the layer's op.
        first_filters: of the convolutions, "uniform" or "normal".
        steps: keys and values per token and head. k and v have `steps` times their heads, those of one head
            after another.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: HeadSizes,
        conv_size: int | None,
        activation: str,
        normalize_qk: bool,
        backend: str = "auto",
        first_filters: str = "uniform",
        steps: int = 1,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.steps = steps
        self.normalize_qk = normalize_qk
        self.backend = choose_layer_backend(backend)
        self.widths = {"q": heads.key, "k": heads.key, "v": heads.value}
        self.build(hidden_size, heads, conv_size, first_filters)

    def build(self, hidden_size: int, heads: HeadSizes, conv_size: int | None, first_filters: str) -> None:
        counts = {"q": heads.key_heads, "k": self.steps * heads.key_heads, "v": self.steps * heads.value_heads}
        for name, width in self.widths.items():
            channels = counts[name] * width
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, channels, bias=False))
            if conv_size is not None:
                self.add_module(f"{name}_conv", ShortConvolution(channels, conv_size, first_filters=first_filters))
        self.has_convolution = conv_size is not None

    def forward(
        self,
        x_BTD: Tensor,
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        cp_group: ContextParallel | None = None,
        products: Products | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k [B, T, H, K], v [B, T, G, V] and, where there is a cache, the new states of the convolutions by name: their last
        inputs [N, W-1, channels]. cp_group: of the mixer. products: modules whose products with x may be computed beside, and
        are then set here."""
        if cache is None and cp_group is None and self._convolves_jointly(x_BTD):
            beside = self._find_beside(products or {})
            joint = project_jointly(x_BTD, *self.projections, *beside, multiple=COLUMNS)
            *flat, rest = convolve_joint(
                joint, self._filters, silu=self.activation == "silu", heads=[norm or 0 for norm in self._norms],
                cu_seqlens=cu_seqlens,
            )  # fmt: skip
            if products is not None and beside:
                sizes = [len(one.weight) for one in beside]
                for one, y in zip(beside, rest[..., : sum(sizes)].split(sizes, -1)):
                    products[one] = y
            return *self._split_heads(flat), {}
        if self._projects_jointly(x_BTD, cache):
            joint = project_jointly(x_BTD, *self.projections)
            flat = [*joint.split([len(cast(Tensor, one.weight)) for one in self.projections], -1)]
        else:
            flat = project_together(x_BTD, *self.projections, backend=self.backend)
        return self.finish(flat, cache, cu_seqlens, cp_group)

    def _projects_jointly(self, x_BTD: Tensor, cache: LayerCache | None) -> bool:
        """Whether one product makes q, k and v of a layer without convolutions in training: where a compiler writes most of
        their gradients side by side, which copies would undo."""
        return (
            cache is None
            and not self.has_convolution
            and torch.compiler.is_compiling()
            and trains_jointly(x_BTD, *self.projections)
        )

    def _convolves_jointly(self, x_BTD: Tensor) -> bool:
        """Whether one product and one op, which have one gradient, make q, k and v in training."""
        if not (self.has_convolution and trains_jointly(x_BTD, *self.projections)):
            return False
        plain = all(is_bare(self.get_submodule(f"{name}_conv"), ShortConvolution) for name in self.widths)
        return plain and takes_joint(x_BTD, self._filters, self.backend)

    def _find_beside(self, products: Products) -> list[Any]:
        """The modules of `products`, whose products may be computed beside where they have the dtype of the projections."""
        found: list[Any] = [*products]
        first: Any = self.projections[0]
        return found if all(one.weight.dtype == first.weight.dtype for one in found) else []

    @property
    def _filters(self) -> list[Tensor]:
        return [cast(Tensor, self.get_submodule(f"{name}_conv").weight) for name in self.widths]

    @property
    def _norms(self) -> list[int | None]:
        """By projection the width of a head that is brought to length 1."""
        return [width if self.normalize_qk and name != "v" else None for name, width in self.widths.items()]

    def _split_heads(self, flat: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.unflatten(2, (-1, width)) for y, width in zip(flat, self.widths.values(), strict=True))
        return q, k, v

    @property
    def projections(self) -> list[nn.Module]:
        return [self.get_submodule(f"{name}_proj") for name in self.widths]

    def input_products(self) -> InputProducts:
        return [] if self.backend == "torch" else plain_products(*self.projections)

    def finish(
        self,
        flat: list[Tensor],
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        cp_group: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """What `forward` gives, from the projections of q, k and v [B, T, channels]."""
        states: list[Tensor | None] = []
        if self.has_convolution:
            flat, states = convolve_together(
                [self.get_submodule(f"{name}_conv") for name in self.widths], flat,
                [None if cache is None else cache.context.get(name) for name in self.widths], cu_seqlens, norms=self._norms,
                activation=ACTIVATIONS[self.activation], keep=cache is not None, backend=self.backend,
                rows=None if cache is None else cache.rows, cp_group=cp_group,
            )  # fmt: skip
        q, k, v = self._split_heads(flat)
        if not self.has_convolution:
            q, k, v = (F.silu(y) if self.activation == "silu" else y for y in (q, k, v))
            q, k = (l2_normalize(y) if self.normalize_qk else y for y in (q, k))
        return q, k, v, {name: state for name, state in zip(self.widths, states, strict=False) if state is not None}


class SharedQKProjection(QKVProjection):
    """q, k = activation(convolution(projection(x))), v = projection(x): the block of Lattice. q and k share the projection and
    have a convolution each, which is the only difference between them."""

    def build(self, hidden_size: int, heads: HeadSizes, conv_size: int | None, first_filters: str) -> None:
        channels = heads.key_heads * heads.key
        self.qk_proj = nn.Linear(hidden_size, channels, bias=False)
        self.v_proj = nn.Linear(hidden_size, heads.value_heads * heads.value, bias=False)
        assert conv_size is not None
        self.q_conv = ShortConvolution(channels, conv_size, first_filters=first_filters)
        self.k_conv = ShortConvolution(channels, conv_size, first_filters=first_filters)

    def forward(
        self,
        x_BTD: Tensor,
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        cp_group: ContextParallel | None = None,
        products: Products | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k [B, T, H, K], v [B, T, G, V] and, where there is a cache, the new state of both convolutions: their last inputs
        [N, W-1, channels]. No products are computed beside."""
        y, v = project_together(x_BTD, *self.projections, backend=self.backend)
        before = None if cache is None else cache.context.get("qk")
        norm = self.widths["q"] if self.normalize_qk else None
        (q, k), (conv_state, _) = convolve_together(
            [self.q_conv, self.k_conv], [y, y], [before, before], cu_seqlens, norms=[norm, norm],
            activation=ACTIVATIONS[self.activation], keep=cache is not None, backend=self.backend,
            rows=None if cache is None else cache.rows, cp_group=cp_group,
        )  # fmt: skip
        q, k, v = (z.unflatten(2, (-1, width)) for z, width in zip((q, k, v), self.widths.values()))
        return q, k, v, {} if conv_state is None else {"qk": conv_state}

    @property
    def projections(self) -> list[nn.Module]:
        return [self.qk_proj, self.v_proj]


class ValueSkip(OwnInitialValues):
    """o + D v with one number D per head: a token's own value reaches the output past the memory (Mamba-2)."""

    _no_weight_decay = ("D",)

    def __init__(self, num_heads: int, first: float = 1.0) -> None:
        super().__init__()
        self.first = first
        self.D = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"D": torch.full_like(self.D, self.first)}

    def forward(self, o_BTGV: Tensor, v_BTGV: Tensor) -> Tensor:
        return torch.addcmul(o_BTGV, self.D[:, None].to(v_BTGV.dtype), v_BTGV)


class OutputProjection(nn.Module):
    """y = W_o [RMSNorm(o) * gate(x)], with a norm over each head by itself or with none.

    Args:
        gate: None, "silu", "sigmoid" or "gelu".
        gate_low_rank: whether the gate's projection goes through one head's width (Kimi Linear) instead of a full matrix.
        backend: of the layer's op.
        norm: whether there is a norm.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: HeadSizes,
        gate: str | None,
        gate_low_rank: bool,
        norm_eps: float,
        backend: str = "auto",
        norm: bool = True,
    ) -> None:
        super().__init__()
        channels = heads.value_heads * heads.value
        self.gate = gate
        self.width = heads.value
        self.backend = choose_layer_backend(backend)
        if gate is not None:
            self.g_proj: nn.Module = (
                nn.Sequential(
                    nn.Linear(hidden_size, heads.value, bias=False), nn.Linear(heads.value, channels, bias=True)
                )
                if gate_low_rank
                else nn.Linear(hidden_size, channels, bias=False)
            )
        self.norm = GatedRMSNorm(heads.value, eps=norm_eps) if norm else None
        self.o_proj = ResidualProjection(channels, hidden_size)

    def input_products(self) -> InputProducts:
        return [] if self.gate is None else plain_products(self.g_proj)

    def low_rank_part(self) -> nn.Module | None:
        """The module that multiplies x first, where the gate's projection has two and nothing notices how they are called."""
        first = None if self.gate is None else find_first_part(self.g_proj)
        return first if first is not None and is_plain(first) and first.bias is None else None

    def gate_values(
        self, x_BTD: Tensor, shift_BTGV: Tensor | None = None, low_rank_BTR: Tensor | None = None
    ) -> Tensor | None:
        """The gate [B, T, G, V] after its function, None without one. For probes: forward fuses it with the norm."""
        if self.gate is None:
            return None
        return GATES[self.gate](self._project_gate(x_BTD, shift_BTGV, low_rank_BTR))

    def _project_gate(self, x_BTD: Tensor, shift_BTGV: Tensor | None, low_rank_BTR: Tensor | None) -> Tensor:
        if low_rank_BTR is None:
            z_BTE = project(x_BTD, self.g_proj)
        else:
            z_BTE = project(low_rank_BTR, cast(nn.Sequential, self.g_proj)[1])
        z_BTGV = z_BTE.unflatten(2, (-1, self.width))
        return z_BTGV if shift_BTGV is None else z_BTGV + shift_BTGV.to(z_BTGV.dtype)

    def forward(
        self,
        o_BTGV: Tensor,
        x_BTD: Tensor,
        v_BTGV: Tensor | None = None,
        skip_G: Tensor | None = None,
        shift_BTGV: Tensor | None = None,
        low_rank_BTR: Tensor | None = None,
    ) -> Tensor:
        """y [B, T, D]. With v and skip, which need the norm, o + skip v takes the place of o, in the same pass. The shift is
        added to the projection of the gate before its function. low_rank_BTR: what `low_rank_part` gives for x, if it is there
        already."""
        z_BTGV = None if self.gate is None else self._project_gate(x_BTD, shift_BTGV, low_rank_BTR)
        if self.norm is not None and takes_linear_rows(x_BTD):
            o_BTE, z_BTE, v_BTE = o_BTGV.flatten(2), *(None if y is None else y.flatten(2) for y in (z_BTGV, v_BTGV))
            if joins_norm(o_BTE, self.norm, self.o_proj, z_BTE, v_BTE, skip_G, backend=self.backend):
                normed = self.norm.of_rows(z_BTE, self.gate or "silu", v_BTE, skip_G)
                return multiply_rows(o_BTE, [self.o_proj.product()], normed).results[0]
        if self.norm is not None:
            o_BTGV = self.norm(o_BTGV, z_BTGV, self.gate or "silu", v_BTGV, skip_G, self.backend)
        elif self.gate is not None and z_BTGV is not None:
            o_BTGV = o_BTGV * GATES[self.gate](z_BTGV)
        return project_trained(o_BTGV.flatten(2), self.o_proj)
