"""Short convolutions over one more token: the kernel (on a GPU or in Triton's interpreter) against that of sequences."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.token import TokenConvolution, convolve_token, takes_token
from tests.fast_set import fast_where, slow
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


def draw(channels: int, head: int | None, width: int, bias: bool = False) -> TokenConvolution:
    numbers = torch.randn(3, channels, width + 2, device=DEVICE)
    x, window = numbers[:, :, 0][:, None].contiguous(), numbers[:, :, 2:-1].mT.contiguous()
    weight = torch.randn(channels, width, device=DEVICE)
    return TokenConvolution(x, weight, weight[:, 0].clone() if bias else None, window, head)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("sizes", [[(40, 20), (60, 20), (48, None)], [(200, None)], [(20, 20), (130, None)]], ids=str)
def test_parts(sizes, silu):
    torch.manual_seed(0)
    parts = [draw(channels, head, 4, bias=head is None) for channels, head in sizes]
    assert takes_token(parts, backend="triton")
    held = [one.window.clone() for one in parts]
    made, windows = convolve_token(parts, silu)
    for one, before, y, window in zip(parts, held, made, windows, strict=True):
        wanted, kept = short_convolution(
            one.x, one.weight, one.bias, activation="silu" if silu else None, normalize=one.head, initial_state=before,
            output_final_state=True, backend="torch",
        )  # fmt: skip
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(window, kept) and torch.equal(one.window, before)


def test_windows_are_written_where_they_lie_where_that_is_allowed():
    parts = [draw(24, 8, 3), draw(16, None, 3)]
    _, wanted = convolve_token(parts, True)
    with overwriting_states():
        _, windows = convolve_token(parts, True)
    for one, window, new in zip(parts, windows, wanted, strict=True):
        assert window is one.window and torch.equal(window, new)


def test_two_convolutions_of_one_input_overwrite_their_window():
    one = draw(24, 8, 3)
    parts = [one, draw(24, 8, 3)._replace(x=one.x, window=one.window)]
    wanted, new = convolve_token(parts, True)
    with overwriting_states():
        made, windows = convolve_token(parts, True)
    assert windows[0] is one.window is windows[1] and torch.equal(windows[0], new[0])
    assert all(map(torch.equal, made, wanted))
    parts[1] = parts[1]._replace(x=one.x.clone())  # of its own: a program of the first one would change what it reads
    with overwriting_states():
        _, windows = convolve_token(parts, True)
    assert windows[0] is not one.window is not windows[1]


def in_pool(one: TokenConvolution, rows: list[int], apart: int) -> TokenConvolution:
    """Its windows in a pool of 6 whose rows lie `apart` numbers further apart than they are long."""
    size = one.window[0].numel()
    pool = torch.randn(6, size + apart, device=DEVICE)[:, :size].view(6, *one.window.shape[1:])
    for window, row in zip(one.window, rows, strict=True):
        if row >= 0:
            pool[row] = window
        else:
            window.zero_()
    return one._replace(window=pool)


@pytest.mark.parametrize("dtype", [torch.int32, *slow(torch.int64)], ids=str)
@pytest.mark.parametrize("sizes", [[(40, 20), (60, 20), (48, None)], [(200, None)], "shared"], ids=str)
def test_rows_of_pools(sizes, dtype):
    """The numbers of the kernel by itself; other rows stay as they are, and a negative row is none."""
    torch.manual_seed(0)
    rows, shared = [4, -1, 2], sizes == "shared"
    parts = [draw(channels, head, 4, bias=head is None) for channels, head in ([(40, 20)] * 2 if shared else sizes)]
    if shared:
        parts[1] = parts[1]._replace(x=parts[0].x, window=parts[0].window)
    pooled = [in_pool(one, rows, apart=8) for one in (parts[:1] if shared else parts)]
    if shared:
        pooled.append(parts[1]._replace(window=pooled[0].window))
    before = [one.window.clone() for one in pooled]
    places = torch.tensor(rows, dtype=dtype, device=DEVICE)
    assert takes_token(pooled, "triton", places)
    wanted, windows = convolve_token(parts, True)
    made, pools = convolve_token(pooled, True, rows=places)
    for one, y, exact, pool, old, new in zip(pooled, made, wanted, pools, before, windows, strict=True):
        assert pool is one.window and torch.equal(y, exact)
        old[4], old[2] = new[0], new[2]
        assert torch.equal(pool, old)


@fast_where(lambda given: given["packed"] == (given["sizes"] == "shared"))
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("sizes", [[(40, 20), (60, 20), (48, None)], "shared"], ids=str)
def test_the_window_after_each_token(sizes, packed):
    """The numbers of the kernel token by token. A sequence may write over the row that it reads, and has no row for some tokens;
    one without a row to read writes nothing."""
    torch.manual_seed(0)
    rows, lengths = [[4, 1, 7, 4], [-1, 3, 6, 0], [2, -1, 5, 8]], [3, 1, 2] if packed else [3, 3, 3]
    shared = sizes == "shared"
    parts = [draw(channels, head, 4, bias=head is None) for channels, head in ([(40, 20)] * 2 if shared else sizes)]
    tokens = [torch.randn(3, 3, one.x.shape[2], device=DEVICE) for one in parts]
    pools = [torch.randn(9, *one.window.shape[1:], device=DEVICE) for one in parts]
    if shared:
        tokens[1], pools[1] = tokens[0], pools[0]
    x = [torch.cat([x[n, :length] for n, length in enumerate(lengths)])[None] if packed else x for x in tokens]
    edges = torch.tensor([0, *accumulate(lengths)], device=DEVICE) if packed else None
    given = [one._replace(x=tokens, window=pool.clone()) for one, tokens, pool in zip(parts, x, pools, strict=True)]
    if shared:
        given[1] = given[1]._replace(window=given[0].window)
    places = torch.tensor(rows, device=DEVICE)
    assert takes_token(given, "triton", places)
    made, after = convolve_token(given, True, rows=places, cu_seqlens=edges)
    kept = [pool.clone() for pool in pools]
    for n, (read, *written) in enumerate(rows):
        windows = [pool[read][None] if read >= 0 else torch.zeros_like(pool[:1]) for pool in pools]
        for t in range(lengths[n]):
            step = [
                one._replace(x=tokens_NTD[n : n + 1, t : t + 1], window=window)
                for one, tokens_NTD, window in zip(parts, tokens, windows, strict=True)
            ]
            wanted, windows = convolve_token(step, True)
            for y, exact in zip(made, wanted, strict=True):
                assert torch.equal(y[0, sum(lengths[:n]) + t] if packed else y[n, t], exact[0, 0])
            if read >= 0 and written[t] >= 0:
                for pool, window in zip(kept, windows, strict=True):
                    pool[written[t]] = window[0]
    assert all(map(torch.equal, after, kept))


def test_pools_that_the_kernel_does_not_serve():
    one, rows = draw(24, 8, 3), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert takes_token([one, one], "triton", rows)
    assert not takes_token([one, one._replace(head=12)], "triton", rows)
    assert not takes_token([one, one, one], "triton", rows)
    assert not takes_token([one._replace(window=one.window.mT.contiguous().mT)], "triton", rows)


def test_what_the_kernel_serves():
    one = draw(24, 8, 3)
    assert not takes_token([one, draw(24, 8, 4)], backend="triton")
    assert not takes_token([draw(24, 8, 9)], backend="triton")
    assert not takes_token([one._replace(x=one.x.expand(3, 2, 24))], backend="triton")
    assert not takes_token([one._replace(x=one.x.requires_grad_())], backend="triton")
    assert not takes_token([one], backend="torch")
