"""Short causal convolution along time, one filter a channel: lets a token see the few tokens before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import check_size
from .initialization import OwnInitialValues

__all__ = ["ShortConvolution"]


class ShortConvolution(OwnInitialValues):
    """y_t = sum_j w_j x_(t-W+1+j) for each channel apart, over the last W tokens of the same sequence.

    Args:
        channels: D.
        width: W, number of tokens seen, the present one included.
        bias: whether a learned number a channel, zero at first, is added.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.width = check_size("width", width)
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """Uniform in +-1/sqrt(W), as torch's own convolutions."""
        weight = torch.empty_like(self.weight, dtype=torch.float32)
        values = {"weight": weight.uniform_(-(self.width**-0.5), self.width**-0.5)}
        return values if self.bias is None else {**values, "bias": torch.zeros_like(self.bias)}

    def forward(
        self, x_BTD: Tensor, window_NWD: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve sequences that follow on the W-1 inputs in `window_NWD` (zeros when None).

        Returns y [B, T, D] and the last W-1 inputs [N, W-1, D] of each sequence, to go on from.
        """
        before, count = self.width - 1, len(x_BTD) if cu_seqlens is None else len(cu_seqlens) - 1
        if window_NWD is None:
            window_NWD = x_BTD.new_zeros(count, before, x_BTD.shape[2])
        if cu_seqlens is None:
            padded = torch.cat([window_NWD, x_BTD], 1)
            return self._convolve(padded), padded[:, padded.shape[1] - before :].clone()  # a view would keep it all

        # Packed sequences: each gets its own W-1 rows in front, then one convolution serves all of them.
        cu_seqlens = cu_seqlens.to(x_BTD.device)
        token_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        # (of all edges, not cu_seqlens[1:]: torch 2.11's inductor loses the offset of a view there)
        row_T = token_T + before * torch.bucketize(token_T, cu_seqlens, right=True)
        edge_N = cu_seqlens + before * torch.arange(count + 1, device=x_BTD.device)
        rows_NW = edge_N[:, None] + torch.arange(before, device=x_BTD.device)
        padded = x_BTD.new_zeros(x_BTD.shape[1] + before * count, x_BTD.shape[2])
        padded = padded.index_copy(0, rows_NW[:-1].flatten(), window_NWD.flatten(0, 1))
        padded = padded.index_copy(0, row_T, x_BTD[0])
        return self._convolve(padded[None])[:, row_T - before], padded[rows_NW[1:] - before]

    def _convolve(self, x_BTD: Tensor) -> Tensor:
        return F.conv1d(x_BTD.mT, self.weight[:, None], self.bias, groups=len(self.weight)).mT

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, width={self.width}"
