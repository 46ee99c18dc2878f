"""The short convolution in PyTorch: one grouped convolution over all sequences, then the activation and the norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["l2_normalize", "torch_form"]


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in x's dtype."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def torch_form(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    edges: Tensor | None,
    silu: bool,
    head: int | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the last W-1 inputs [N, W-1, D] of each sequence."""
    y, window = _convolve(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), window, edges)
    y = F.silu(y) if silu else y
    return y if head is None else l2_normalize(y.unflatten(2, (-1, head)), eps).flatten(2), window


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    before, count = weight.shape[1] - 1, len(x) if edges is None else len(edges) - 1
    if window is None:
        window = x.new_zeros(count, before, x.shape[2])
    if edges is None:
        padded = torch.cat([window, x], 1)
        return _filter(padded, weight, bias), padded[:, padded.shape[1] - before :].clone()  # a view would keep it all

    # Packed sequences: each gets its own W-1 rows in front, then one convolution serves all of them.
    token = torch.arange(x.shape[1], device=x.device)
    # (of all edges, not edges[1:]: torch 2.11's inductor loses the offset of a view there)
    row = token + before * torch.bucketize(token, edges, right=True)
    start = edges + before * torch.arange(count + 1, device=x.device)
    rows_of_windows = start[:, None] + torch.arange(before, device=x.device)
    padded = x.new_zeros(x.shape[1] + before * count, x.shape[2])
    padded = padded.index_copy(0, rows_of_windows[:-1].flatten(), window.flatten(0, 1))
    padded = padded.index_copy(0, row, x[0])
    return _filter(padded[None], weight, bias)[:, row - before], padded[rows_of_windows[1:] - before]


def _filter(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv1d, except for no tokens, which it refuses, and in a graph: torch's compiler takes the length as fixed in its backward.
    There shifted inputs are added up, in float32 at least as conv1d does, which the compiler joins into one loop."""
    length = x.shape[1] - weight.shape[1] + 1
    if not torch.compiler.is_compiling() and length:
        return F.conv1d(x.mT, weight[:, None], bias, groups=len(weight)).mT
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, taps = x.to(wide), weight.to(wide)
    y = rows[:, :length] * taps[:, 0]
    for shift in range(1, weight.shape[1]):
        y = torch.addcmul(y, rows[:, shift : shift + length], taps[:, shift])
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
