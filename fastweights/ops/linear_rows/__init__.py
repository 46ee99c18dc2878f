"""Linear maps of a few rows, such as those of decoding, in one launch with what stands around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ...kernels.pointwise import Normed, Product, RowProducts
from ..framework.few_tokens import needs_gradient

__all__ = ["Normed", "Product", "RowProducts", "linear_rows", "multiply_rows", "takes_linear_rows"]

MOST_ROWS = 64


def takes_linear_rows(x: Tensor, *others: Tensor | None, backend: str = "auto") -> bool:
    """Whether the kernel serves x [..., D]: at most 64 rows, matrices in its dtype, vectors in any, no gradients, no autocast, no
    graph that is traced."""
    given = [y for y in others if y is not None]
    return (
        takes_kernels(backend, x)
        and not torch.compiler.is_compiling()
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and all(y.device == x.device and (y.dtype == x.dtype or y.ndim == 1) for y in given)
        and not torch.is_autocast_enabled(x.device.type)
        and not needs_gradient({"x": x, **{str(i): y for i, y in enumerate(given)}})
    )


def linear_rows(
    x: Tensor, *weights: Tensor, kind: str = "plain", bias: Tensor | None = None, other: Tensor | None = None,
    largest: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    r"""One result [..., width] per matrix, or one in all for "swiglu", for x [..., D] that `takes_linear_rows` allows.

    Args:
        weights: matrices [width, D]: any number of kind "plain", two of kind "swiglu", one of the others.
        kind, bias, other, largest: as in `Product`. The bias is that of a single matrix.
    """
    if kind == "swiglu":
        return multiply_rows(x, [Product(weights[0], kind, more=weights[1])]).results
    return multiply_rows(x, [Product(weight, kind, bias, other, largest) for weight in weights]).results


def multiply_rows(
    x: Tensor | Sequence[Tensor], products: Sequence[Product], normed: Normed | None = None
) -> RowProducts:
    r"""Several products of x [..., D] that `takes_linear_rows` allows, each of its own kind; one of kind "swiglu" alone. With
    `normed` they are those of a norm of x: of a residual stream, of heads, or a LayerNorm. Each of at most eight may have its own
    x, of the same rows and any width, none of kind "swiglu"; without `normed`."""
    from ...kernels.pointwise.linear_rows import MOST_PRODUCTS, multiply_rows

    if not isinstance(x, Tensor):
        return multiply_rows(x, products)
    first = multiply_rows(x, products[:MOST_PRODUCTS], normed)
    results = first.results
    for place in range(MOST_PRODUCTS, len(products), MOST_PRODUCTS):
        results += multiply_rows(x if first.n is None else first.n, products[place : place + MOST_PRODUCTS]).results
    return first._replace(results=results)
