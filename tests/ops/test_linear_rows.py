"""Linear maps of a few rows with what follows them: the kernel (on a GPU or in Triton's interpreter) against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.pointwise import FEW_ROWS
from fastweights.ops.gated_norm import gated_rms_norm
from fastweights.ops.linear_rows import Normed, Product, linear_rows, multiply_rows, takes_linear_rows
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


@pytest.mark.kernels
@pytest.mark.parametrize("rows, channels", [((1, 1), 40), ((3, 1), 300), ((2, 9), 64)], ids=str)
@pytest.mark.parametrize("widths", [(17,), (32, 8), (16, 40, 5)], ids=str)
def test_matrices_of_one_input(rows, channels, widths):
    x, weights = draw(*rows, channels), [draw(width, channels, seed=i) for i, width in enumerate(widths)]
    for got, w in zip(linear_rows(x, *weights), weights, strict=True):
        torch.testing.assert_close(got, F.linear(x, w), **CLOSE)


@fast_where(lambda given: given["rows"] == 17)
@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_what_follows(rows):
    x, w, more = draw(rows, 1, 72), draw(24, 72, seed=1) / 8, draw(24, 72, seed=2) / 8
    bias, residual, log_rate = draw(24, seed=3), draw(rows, 1, 24, seed=4), draw(6, seed=5)
    y = F.linear(x, w)
    cases = [
        ({"bias": bias}, (w,), y + bias),
        ({"kind": "add", "other": residual}, (w,), residual + y),
        ({"kind": "swiglu"}, (w, more), F.silu(y) * F.linear(x, more)),
        ({"kind": "sigmoid", "largest": 2.0}, (w,), 2 * torch.sigmoid(y)),
        ({"kind": "sigmoid", "bias": bias}, (w,), torch.sigmoid(y + bias)),
        ({"kind": "tanh"}, (w,), y.tanh()),
        (
            {"kind": "forget", "bias": bias, "other": log_rate}, (w,),
            (-log_rate.exp().repeat_interleave(4) * F.softplus(y + bias)).exp(),
        ),
        ({"kind": "logsigmoid", "largest": 0.25}, (w,), F.logsigmoid(y) / 4),
        ({"kind": "logsigmoid", "bias": bias}, (w,), F.logsigmoid(y + bias)),
        (
            {"kind": "sigmoid", "other": log_rate}, (w,),
            log_rate.exp().repeat_interleave(4) * torch.sigmoid(y),
        ),
        (
            {"kind": "decay", "bias": bias, "other": log_rate}, (w,),
            -log_rate.exp().repeat_interleave(4) * F.softplus(y + bias),
        ),
    ]  # fmt: skip
    for options, weights, wanted in cases:
        (got,) = linear_rows(x, *weights, **options)
        torch.testing.assert_close(got, wanted, **CLOSE, msg=lambda m, o=options: f"{o.get('kind')}: {m}")


@fast_where(lambda given: given["rows"] == 2)
@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_one_input_for_each_product(rows):
    for depths in ((300, 300, 300), (64, 300, 1)):
        x = [draw(rows, 1, depth, seed=depth + i) for i, depth in enumerate(depths)]
        weights = [draw(width, depth, seed=width) / 17 for width, depth in zip((40, 3, 33), depths, strict=True)]
        products = [Product(weights[0]), Product(weights[1], "sigmoid", rounds=True), Product(weights[2])]
        got = multiply_rows(x, products).results
        first, second, third = (F.linear(one, w) for one, w in zip(x, weights, strict=True))
        for one, other in zip(got, (first, second.sigmoid(), third), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
    assert (
        multiply_rows(x[1].half(), [Product(weights[1].half(), "sigmoid", rounds=True)]).results[0].dtype == torch.half
    )


@fast_where(lambda given: given["rows"] == 2)
@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_norm_of_a_residual_stream(rows):
    """More products than one launch has; the sum and the norm are results, too."""
    x, branch, scale = draw(rows, 1, 300), draw(rows, 1, 300, seed=1), draw(300, seed=2)
    weights = [draw(width, 300, seed=width) / 17 for width in range(3, 13)]
    s = x + branch
    n = F.rms_norm(s, (300,), scale, 1e-6)
    gate, rate = draw(4, 300, seed=3) / 17, draw(2, seed=4)
    products = [*map(Product, weights), Product(gate, "sigmoid", other=rate)]
    got = multiply_rows(x, products, Normed(scale, 1e-6, branch))
    wanted = [F.linear(n, w) for w in weights]
    wanted.append(rate.exp().repeat_interleave(2) * F.linear(n, gate).sigmoid())
    for one, other in zip([got.s, got.n, *got.results], [s, n, *wanted], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    (h,) = multiply_rows(x, [Product(weights[0], "swiglu", more=weights[0].neg())], Normed(scale, 1e-6)).results
    y = F.linear(F.rms_norm(x, (300,), scale, 1e-6), weights[0])
    torch.testing.assert_close(h, F.silu(y) * -y, **CLOSE)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "channels, width, rows",
    [
        pytest.param(*sizes, rows, id=f"{sizes[0]}-{sizes[1]}-{rows}", marks=() if rows in fast else pytest.mark.slow)
        for sizes, fast in {
            (512, 64): [5],
            (384, 128): [2],
            (512, 256): [],
            (96, 96): [2],
            (144, 48): [5],
        }.items()
        for rows in (1, 2, 5)
    ],
)
def test_norm_of_heads(rows, channels, width):
    """Heads narrower than a block of the kernel, as wide, wider, all of the row, and of a width that needs its own launch."""
    x, gate, value = (draw(rows, 1, channels, seed=i) for i in range(3))
    w, scale, skip = draw(17, channels, seed=3) / channels**0.5, draw(width, seed=4), draw(channels // width, seed=5)
    each = draw(channels // width, width, seed=6)
    cases: list[dict[str, Any]] = [
        {"weight": scale}, {"weight": scale, "gate": gate}, {"weight": each, "gate": gate, "gate_first": True},
        {"weight": scale, "gate": gate, "activation": "sigmoid", "value": value, "skip": skip},
    ]  # fmt: skip
    for case in cases:
        (got,) = multiply_rows(x, [Product(w)], Normed(**case, eps=1e-6, width=width)).results
        heads = {name: y.unflatten(-1, (-1, width)) if name in ("gate", "value") else y for name, y in case.items()}
        n = gated_rms_norm(x.unflatten(-1, (-1, width)), **heads, eps=1e-6, backend="torch")
        torch.testing.assert_close(got, F.linear(n.flatten(-2), w), **CLOSE, msg=lambda m, c=case: f"{[*c]}: {m}")


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads, width", [(8, 512), (8, 64), (2, 128)], ids=str)
def test_norm_of_groups_that_are_no_heads(rows, heads, width):
    """The heads whose values are added are as wide as the groups that are normalised, narrower or wider."""
    x, gate, value = (draw(rows, 1, 512, seed=i) for i in range(3))
    w, scale, skip = draw(17, 512, seed=3) / 23, draw(512 // width, width, seed=4), draw(heads, seed=5)
    given = Normed(scale, 1e-6, gate=gate, value=value, skip=skip, gate_first=True, width=width)
    (got,) = multiply_rows(x, [Product(w)], given).results
    u = (x + skip.repeat_interleave(512 // heads) * value) * F.silu(gate)
    n = F.rms_norm(u.unflatten(-1, (-1, width)), (width,), eps=1e-6) * scale
    torch.testing.assert_close(got, F.linear(n.flatten(-2), w), **CLOSE)


@fast_where(lambda given: given["rows"] == 2)
@pytest.mark.kernels
@pytest.mark.parametrize("channels", [40, 512, 300])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_layer_norm(rows, channels):
    """Rows far from zero, whose mean counts, narrower than a block of the kernel, and not a multiple of one."""
    x, w = draw(rows, 1, channels) + 8, draw(17, channels, seed=3) / channels**0.5
    scale, shift = draw(channels, seed=4), draw(channels, seed=5)
    (got,) = multiply_rows(x, [Product(w)], Normed(scale, 1e-5, shift=shift)).results
    torch.testing.assert_close(got, F.linear(F.layer_norm(x, (channels,), scale, shift, 1e-5), w), **CLOSE)


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [2, 40])
def test_a_row_gets_the_same_bits_alone_and_among_others(rows):
    """Among few others and among many, which other arithmetic multiplies."""
    x, w = draw(rows, 96), draw(32, 96, seed=1)
    (together,) = linear_rows(x, w)
    # The interpreter's products are numpy's, whose order of sums follows the shape and the place in memory.
    tolerance = {"rtol": 0, "atol": 0} if x.is_cuda else CLOSE
    fewest = 1 if rows <= FEW_ROWS else FEW_ROWS + 1
    for part in (slice(fewest), slice(rows - fewest, rows)):
        torch.testing.assert_close(linear_rows(x[part], w)[0], together[part], **tolerance)


@pytest.mark.kernels
def test_a_slice_is_read_where_it_lies_and_a_bad_number_stays_in_its_row():
    x, w = draw(4, 100)[:, 3:67], draw(8, 64, seed=1)
    torch.testing.assert_close(linear_rows(x, w)[0], F.linear(x, w), **CLOSE)
    x[1, 5] = float("nan")
    (got,) = linear_rows(x, w)
    assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()


@pytest.mark.kernels
def test_what_the_kernel_serves():
    x, w = torch.zeros(64, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE)
    assert takes_linear_rows(x, w, None, torch.zeros(4, device=DEVICE).half(), backend="triton")
    assert not takes_linear_rows(torch.zeros(65, 8, device=DEVICE), w, backend="triton")
    assert not takes_linear_rows(x, w.half(), backend="triton")
    assert not takes_linear_rows(x, w.requires_grad_(), backend="triton")
    with torch.no_grad():
        assert takes_linear_rows(x, w, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad():
        assert not takes_linear_rows(x, w, backend="triton")
    assert not takes_linear_rows(x, w, backend="torch")
