"""The short convolution: the PyTorch form against plain formulas, the kernels against the PyTorch form.

The kernels run on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1 before pytest).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.token import short_convolution_step, takes_step
from tests.fast_set import fast_where, slow
from tests.kernels.cases import DEVICE


@pytest.fixture(autouse=True)
def tiles_of_several_rows(monkeypatch):
    """As long inputs have them."""
    if HAS_TRITON and INTERPRETED:
        from fastweights.kernels.pointwise import short_convolution as kernels

        monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", 1)


def inputs(
    batch: int, time: int, channels: int, width: int, count: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "x": (batch, time, channels), "weight": (channels, width), "bias": (channels,),
        "initial_state": (batch if count is None else count, width - 1, channels),
    }  # fmt: skip
    return {name: torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for name, s in shapes.items()}


def results(given: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """y, the final window and the gradients of both in what is given."""
    y, final = short_convolution(**given, **options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    outputs = {"y": y} if final is None else {"y": y, "final": final}
    towards = [torch.randn(z.shape, device=DEVICE).to(z.dtype) for z in outputs.values()]
    gradients = torch.autograd.grad(list(outputs.values()), list(given.values()), towards)
    return {**{n: z.detach() for n, z in outputs.items()}, **{f"d{n}": g for n, g in zip(given, gradients)}}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor, silu: bool, head: int | None) -> Tensor:
    """y [T, D] of one sequence."""
    seen = torch.cat([window, x])
    rows = []
    for t in range(len(x)):
        c = sum(weight[:, j] * seen[t + j] for j in range(weight.shape[1])) + bias
        s = c / (1 + torch.exp(-c)) if silu else c
        if head is not None:
            s = torch.cat([h / (h.square().sum() + 1e-3).sqrt() for h in s.split(head)])
        rows.append(s)
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("head", [None, 3])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_formula(width, activation, head):
    given = inputs(1, 9, 6, width, count=3, dtype=torch.float64)
    options = {"activation": activation, "normalize": head, "eps": 1e-3, "backend": "torch"}
    edges = torch.tensor([0, 7, 7, 9], device=DEVICE)
    y, final = short_convolution(**given, **options, cu_seqlens=edges, output_final_state=True)
    x, weight, bias, windows = given.values()
    parts = [x[0, :7], x[0, 7:7], x[0, 7:]]
    wanted = torch.cat([by_hand(part, weight, bias, w, activation == "silu", head) for part, w in zip(parts, windows)])
    torch.testing.assert_close(y[0], wanted)
    for n, part in enumerate(parts):
        seen = torch.cat([windows[n], part])
        torch.testing.assert_close(final[n], seen[len(seen) - width + 1 :])
    towards = torch.randn_like(wanted)
    leaves = list(given.values())
    got = torch.autograd.grad(y, leaves, towards[None], materialize_grads=True, allow_unused=True)
    for name, g, w in zip(
        given, got, torch.autograd.grad(wanted, leaves, towards, materialize_grads=True, allow_unused=True)
    ):
        torch.testing.assert_close(g, w, msg=lambda m, n=name: f"{n}: {m}")


TIMES_AND_WIDTHS = [(17, 4)]  # the slow set has all pairs


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("time", "width"),
    [
        pytest.param(time, width, marks=() if (time, width) in TIMES_AND_WIDTHS else pytest.mark.slow)
        for time in (1, 3, 17)
        for width in (1, 2, 3, 4, 5, 8)
    ],
)
def test_kernels(time, width):
    given = inputs(2, time, 40, width)
    options = {"activation": "silu", "normalize": 20, "output_final_state": True}
    assert_same(results(given, **options, backend="triton"), results(given, **options, backend="torch"))


@pytest.mark.kernels
@pytest.mark.parametrize("time", [*slow(63), 65])
def test_kernels_of_several_segments(time):
    given = inputs(1, time, 5, 4)
    del given["bias"], given["initial_state"]
    assert_same(results(given, activation="silu", backend="triton"), results(given, activation="silu", backend="torch"))


@fast_where(lambda given: given["activation"] is None or given["head"] == 96)
@pytest.mark.kernels
@pytest.mark.parametrize("head", [1, 96, 256])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_kernels_of_any_head(activation, head):
    given = inputs(1, 5, head, 3)
    del given["initial_state"]
    options = {"activation": activation, "normalize": head}
    assert_same(
        results(given, **options, backend="triton"), results(given, **options, backend="torch"), rtol=1e-4, atol=1e-4
    )


@fast_where(lambda given: given["keep"] == (len(given["edges"]) == 6))
@pytest.mark.kernels
@pytest.mark.parametrize("edges", [[0, 3, 3, 4, 14, 20], [0, 0, 20, 20], [*range(8), 20]], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_kernels_of_packed_sequences(edges, keep):
    given = inputs(1, 20, 6, 4, count=len(edges) - 1)
    options = {"cu_seqlens": torch.tensor(edges, device=DEVICE), "activation": "silu", "output_final_state": keep}
    assert_same(results(given, **options, backend="triton"), results(given, **options, backend="torch"))


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_of_few_segments(monkeypatch):
    from fastweights.kernels.pointwise import short_convolution as kernels

    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", 100)
    given = inputs(2, 10, 8, 4)
    options = {"activation": "silu", "normalize": 4, "output_final_state": True}
    assert_same(results(given, **options, backend="triton"), results(given, **options, backend="torch"))


@pytest.mark.kernels
def test_nothing_leaks_between_packed_sequences():
    given = inputs(1, 12, 8, 4)
    x, edges = given["x"].detach().clone(), torch.tensor([0, 5, 12], device=DEVICE, dtype=torch.int32)
    x[0, 4] = float("nan")
    x.requires_grad_()
    y, _ = short_convolution(x, given["weight"], normalize=4, cu_seqlens=edges, backend="triton")
    assert y[0, 4].isnan().all() and y[0, :4].isfinite().all() and y[0, 5:].isfinite().all()
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert dx[0, 5:].isfinite().all() and dx[0, 0].isfinite().all()


@pytest.mark.kernels
def test_kernels_in_parts_are_the_whole():
    given = inputs(2, 11, 8, 4)
    options = {"activation": "silu", "normalize": 8, "output_final_state": True, "backend": "triton"}
    parts, window = [], given["initial_state"]
    with torch.no_grad():
        wanted, final = short_convolution(**given, **options)
        for part in given["x"].split([1, 2, 1, 7], 1):
            y, window = short_convolution(part, given["weight"], given["bias"], initial_state=window, **options)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), wanted)
    assert torch.equal(window, final)


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_read_a_slice_where_it_lies():
    given = inputs(2, 6, 8, 4)
    joint = torch.randn(2, 6, 30, device=DEVICE)
    joint[..., 5:13] = given["x"].detach()
    sliced = {**given, "x": joint[..., 5:13].requires_grad_()}
    wanted = results(given, activation="silu", normalize=4, backend="triton")
    assert_same(results(sliced, activation="silu", normalize=4, backend="triton"), wanted, rtol=0, atol=0)
    turned = {**given, "x": given["x"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()}
    assert_same(results(turned, activation="silu", normalize=4, backend="triton"), wanted, rtol=0, atol=0)


@pytest.mark.kernels
def test_kernels_in_one_graph():
    given = inputs(1, 6, 8, 3, count=2)
    options = {"activation": "silu", "normalize": 4, "output_final_state": True, "backend": "triton"}
    options["cu_seqlens"] = torch.tensor([0, 2, 6], device=DEVICE)
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    wanted = results(given, **options)
    y, final = compiled(**given, **options)
    torch.manual_seed(1)
    towards = [torch.randn(z.shape, device=DEVICE) for z in (y, final)]
    gradients = torch.autograd.grad([y, final], list(given.values()), towards)
    assert_same({"y": y, "final": final, **{f"d{n}": g for n, g in zip(given, gradients)}}, wanted, rtol=0, atol=0)


@pytest.mark.kernels
def test_kernels_under_checkpointing_and_autocast():
    given = inputs(1, 4, 8, 4)
    wanted = results(given, activation="silu", backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y, _ = checkpoint(
            lambda *a: short_convolution(*a[:3], initial_state=a[3], activation="silu", backend="triton"),
            *given.values(), use_reentrant=False,
        )  # fmt: skip
    torch.manual_seed(1)
    gradients = torch.autograd.grad(y, list(given.values()), torch.randn(y.shape, device=DEVICE))
    assert_same({"y": y, **{f"d{n}": g for n, g in zip(given, gradients)}}, wanted, rtol=0, atol=0)


@pytest.mark.kernels
def test_kernels_without_tokens():
    given = inputs(2, 0, 8, 4)
    wanted = results(given, output_final_state=True, backend="torch") if DEVICE == "cuda" else {}
    got = results(given, output_final_state=True, backend="triton")
    assert_same(got, wanted)
    assert torch.equal(got["final"], given["initial_state"]) and not got["dweight"].any()


GOOD = {"x": torch.zeros(2, 5, 6), "weight": torch.zeros(6, 4)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(5, 6)}, r"x must be \[B, T, D\]"),
        ({"weight": torch.zeros(4, 6)}, r"weight must be \[6, W\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[6\]"),
        ({"activation": "relu"}, "activation must be None or 'silu'"),
        ({"normalize": 4}, "a divisor of 6"),
        ({"normalize": True}, "a divisor of 6"),
        ({"eps": -1.0}, "eps must be"),
        ({"initial_state": torch.zeros(2, 4, 6)}, r"initial_state must be \[2, 3, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "batch must be 1"),
        ({"x": torch.zeros(1, 5, 6), "cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must rise"),
        ({"x": torch.zeros(1, 5, 6), "cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be int32 or int64"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"x": torch.zeros(2, 5, 6, dtype=torch.int64)}, "x must be float16"),
        ({"x": torch.zeros(2, 5, 6).double(), "backend": "triton"}, "backend 'triton'"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        short_convolution(**{**GOOD, **change})


def test_triton_where_there_is_none(monkeypatch):
    monkeypatch.setattr("fastweights.kernels.availability.HAS_TRITON", False)
    with pytest.raises(ValueError, match="package triton"):
        short_convolution(**GOOD, backend="triton")
    assert short_convolution(**GOOD)[0].shape == (2, 5, 6)


@pytest.mark.kernels
def test_filters_too_wide_for_the_kernels():
    x, weight = torch.zeros(1, 2, 3, device=DEVICE), torch.zeros(3, 9, device=DEVICE)
    with pytest.raises(ValueError, match="up to 8 wide"):
        short_convolution(x, weight, backend="triton")
    assert short_convolution(x, weight)[0].shape == x.shape


@fast_where(lambda given: (given["dtype"] == torch.float32) == (given["width"] in (1, 4)) and given["width"] != 3)
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "width, kept, silu, biased", [(4, 4, True, False), (3, 2, False, True), (1, 1, True, True), (2, 5, True, False)]
)
def test_a_step_updates_the_last_inputs(width: int, kept: int, silu: bool, biased: bool, dtype: torch.dtype) -> None:
    """One token after others, in the layout of transformers: inputs of a channel lie together."""
    torch.manual_seed(0)
    before, x = torch.randn(3, 130, kept), torch.randn(3, 260, 1)[:, ::2]
    weight, bias = torch.randn(130, width), torch.randn(130) if biased else None
    before, x = before.to(DEVICE, dtype), x.to(DEVICE, dtype)
    weight, bias = weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    seen = torch.cat([before, x], 2)
    wanted = (seen[..., -width:].float() * weight).sum(2) + (0 if bias is None else bias)
    state = before.clone()
    assert takes_step(x, state, weight, bias, backend="triton")
    y = short_convolution_step(x, state, weight, bias, silu)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(y[..., 0].float(), torch.nn.functional.silu(wanted) if silu else wanted, **tolerance)
    assert torch.equal(state, seen[..., 1:])

    def choose(*tensors: Tensor | None) -> Tensor | None:
        return short_convolution_step(*tensors, silu) if takes_step(*tensors, "triton") else None

    again = before.clone()
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="aot_eager")(x, again, weight, bias), y)
    assert torch.equal(again, state)
    torch.library.opcheck(torch.ops.fastweights.short_convolution_step.default, (x, again, weight, bias, silu))


@pytest.mark.kernels
def test_steps_for_the_kernel() -> None:
    """One token without gradients, and inputs that lie together."""
    x, state, weight = (torch.ones(shape, device=DEVICE) for shape in ((2, 6, 1), (2, 6, 4), (6, 4)))
    assert takes_step(x, state, weight, None, "triton")
    for other in (
        (x.expand(2, 6, 3), state, weight), (x, state.mT.contiguous().mT, weight), (x, state[..., :2], weight),
        (x, state, weight.clone().requires_grad_()),
    ):  # fmt: skip
        assert not takes_step(*other, None, "triton")
