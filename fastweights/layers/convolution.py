"""Short causal convolution along time, one filter per channel: a token sees the few tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_size
from ..ops.authoring import (
    TokenConvolution,
    convolve_token,
    needs_gradient,
    read_rows,
    short_convolution,
    takes_token,
    write_rows,
)
from .initialization import OwnInitialMatrices
from .wrapped import is_bare

__all__ = ["FIRST_FILTERS", "ShortConvolution", "convolve_together"]

FIRST_FILTERS = ("uniform", "normal")


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
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve sequences, then apply the activation and the norm of heads of `normalize` channels.

        conv_state_NWD holds the W-1 inputs before those in x, zeros when None. Returns y [B, T, D] and the last W-1 inputs
        [N, W-1, D] of each sequence for the next call, None where `output_final_state` is False.
        """
        return short_convolution(
            x_BTD, self.weight, self.bias, activation=activation, normalize=normalize, initial_state=conv_state_NWD,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, backend=backend,
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
) -> tuple[list[Tensor], list[Tensor | None]]:
    """What up to three `ShortConvolution` give for their inputs [B, T, D], and with `keep` the last inputs of each for the next
    call, else None. One kernel serves them where there is one token per sequence. Convolutions with one window must have one
    input. rows: as in `LayerCache`; the windows are then pools and are brought up to date."""
    if rows is not None:
        parameters = [given for one in convolutions for given in one.parameters()]
        if needs_gradient({str(i): x for i, x in enumerate([*inputs, *parameters])}):
            raise ValueError(
                "a cache with rows of a pool must be used under torch.no_grad(), as its states are overwritten; use one without "
                "rows for gradients"
            )
    joined = keep and cu_seqlens is None and all(is_bare(one, ShortConvolution) for one in convolutions)
    if joined and all(window is not None for window in windows):
        parts = [
            TokenConvolution(x, one.weight, one.bias, window, norm)
            for x, one, window, norm in zip(inputs, convolutions, windows, norms, strict=True)
            if window is not None
        ]
        if takes_token(parts, backend, rows):
            made, after = convolve_token(parts, activation is not None, rows=rows)
            return made, list(after)
    if rows is not None:
        made, states = convolve_together(
            convolutions, inputs, [read_rows(pool, rows) for pool in windows if pool is not None], cu_seqlens, norms=norms,
            activation=activation, keep=True, backend=backend,
        )  # fmt: skip
        for pool, state in zip(windows, states, strict=True):
            if pool is not None and state is not None:
                write_rows(pool, state, rows)
        return made, list(windows)
    results = [
        one(
            x, window, cu_seqlens, activation=activation, normalize=norm, output_final_state=keep, backend=backend,
        )
        for x, one, window, norm in zip(inputs, convolutions, windows, norms, strict=True)
    ]  # fmt: skip
    return [y for y, _ in results], [state for _, state in results]
