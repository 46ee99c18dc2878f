"""The kernels around the memories at the sizes of real layers, against the PyTorch forms in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.models.loss import summed_cross_entropy
from fastweights.ops.cross_entropy import cross_entropy_errors, cross_entropy_gradients, cross_entropy_rows
from fastweights.ops.gated_norm import gated_rms_norm
from fastweights.ops.gated_writes import gated_writes
from fastweights.ops.joined_product import add_product_, joined_product
from fastweights.ops.residual_norm import residual_norm
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.joint import convolve_joint
from fastweights.ops.silu_product import silu_product, silu_product_of_halves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
# RMS of the difference over RMS of the float64 result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def compare(call: Callable[..., Iterable[Tensor]], leaves: list[Tensor], dtype: torch.dtype) -> None:
    """Values and gradients of the kernels, twice the same, and near those of PyTorch."""

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        outputs = list(call(*given, backend=backend))
        generator = torch.Generator("cuda").manual_seed(1)
        towards = [torch.randn(y.shape, device="cuda", generator=generator).to(dtype).to(y.dtype) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, given, towards)]

    got, again = (run("triton", leaves) for _ in range(2))
    wanted = run("torch", [x.detach().double().requires_grad_() for x in leaves])
    for index, (x, same, y) in enumerate(zip(got, again, wanted)):
        assert torch.equal(x, same), f"result {index} differs between two runs"
        error = (x.double() - y).square().mean().sqrt() / y.square().mean().sqrt()
        assert error <= TOLERANCE[dtype], f"result {index}: {error:.1e}"


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "batch, time, channels, head, width",
    [(4, 2048, 1024, 128, 4), (1, 4100, 768, 96, 4), (2, 1000, 512, 256, 3), (3, 65, 320, 64, 8), (64, 1, 1024, 128, 4),
     (2, 77, 40, 20, 5), (2, 300, 200, None, 2)],
    ids=str,
)  # fmt: skip
def test_short_convolution(batch, time, channels, head, width, dtype):
    x, window = leaf(batch, time, channels, dtype=dtype), leaf(batch, width - 1, channels, dtype=dtype, seed=1)

    def call(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor, backend: str) -> tuple[Tensor, Tensor | None]:
        return short_convolution(
            x, weight, bias, activation="silu", normalize=head, initial_state=window, output_final_state=True,
            backend=backend,
        )  # fmt: skip

    compare(call, [x, window, leaf(channels, width, seed=2), leaf(channels, seed=3)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 1])
def test_short_convolution_of_packed_slices(offset, dtype):
    lengths = torch.tensor([1000, 0, 1, 2, 700, 31, 32, 33, 1297])
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()

    def call(joint: Tensor, weight: Tensor, backend: str) -> tuple[Tensor]:
        x = joint[..., offset : offset + 512]
        return (short_convolution(x, weight, activation="silu", normalize=64, cu_seqlens=edges, backend=backend)[0],)

    compare(call, [leaf(1, int(lengths.sum()), 1032, dtype=dtype), leaf(512, 4, seed=1)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("beside", [0, 16])
@pytest.mark.parametrize("value", [128, 64])
def test_joint_convolution(value, beside, dtype):
    """With values of another width the filters of the parts have other tiles."""
    widths, heads = [1024, 1024, 8 * value], [128, 128, 0]
    edges = torch.tensor([0, 3000, 3000, 3001, 4096]).cuda()

    def call(joint: Tensor, *weights: Tensor, backend: str) -> list[Tensor]:
        if backend == "triton":
            found = convolve_joint(joint, weights, silu=True, heads=heads, cu_seqlens=edges)
            return [y for y in found if y is not None]
        *parts, rest = joint.split([*widths, beside], -1)
        made = [
            short_convolution(x, w, activation="silu", normalize=head or None, cu_seqlens=edges, backend=backend)[0]
            for x, w, head in zip(parts, weights, heads)
        ]
        return [*made, *([rest] if beside else [])]

    filters = [leaf(width, 4, seed=1 + i) for i, width in enumerate(widths)]
    compare(call, [leaf(1, 4096, sum(widths) + beside, dtype=dtype), *filters], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_joined_product(dtype):
    """Gradients of float32 weights are not rounded to 16 bits, nor is a sum of products."""
    x, weights = leaf(2, 700, 256, dtype=dtype), [leaf(n, 256, seed=1 + n) for n in (384, 16)]
    with torch.autocast("cuda", dtype=dtype):
        y = joined_product(x, *weights)
    dy = torch.randn(y.shape, device="cuda").to(dtype)
    found = torch.autograd.grad(y, weights, dy)
    wanted = (dy.flatten(0, 1).double().mT @ x.detach().flatten(0, 1).double()).split([384, 16])
    total = leaf(400, 256, seed=5).detach()
    summed = total.double() + torch.cat(wanted)
    add_product_(total, dy.flatten(0, 1).mT, x.detach().flatten(0, 1))
    for got, exact in zip([*found, total], [*wanted, summed], strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "activation, first", [(None, False), ("silu", False), ("sigmoid", False), ("gelu", False), ("silu", True)]
)
@pytest.mark.parametrize(
    "shape, per_group",
    [
        ((4, 2048, 8, 128), False),
        ((2, 700, 4, 96), False),
        ((3, 100, 5, 256), False),
        ((2, 500, 1, 2048), True),
        ((64, 1, 8, 128), False),
        ((2, 65, 2, 20), True),
        ((1, 300, 1, 4096), True),
    ],
    ids=str,
)
def test_gated_norm(shape, per_group, activation, first, dtype):
    def call(x: Tensor, weight: Tensor, *gate: Tensor, backend: str) -> tuple[Tensor]:
        return (gated_rms_norm(x, weight, *gate, activation=activation or "silu", gate_first=first, backend=backend),)

    gate = [] if activation is None else [leaf(*shape, dtype=dtype, seed=1)]
    compare(call, [leaf(*shape, dtype=dtype), leaf(*shape[-2 if per_group else -1 :], seed=2), *gate], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(16, 2048, 16, 48), (8, 2048, 8, 128), (3, 65, 2, 20)], ids=str)
def test_gated_norm_with_a_skip(shape, dtype):
    """As a palimpsa-d layer calls it."""

    def call(x: Tensor, weight: Tensor, gate: Tensor, value: Tensor, skip: Tensor, backend: str) -> tuple[Tensor]:
        return (gated_rms_norm(x, weight, gate, value=value, skip=skip, backend=backend),)

    rows = [leaf(*shape, dtype=dtype, seed=seed) for seed in range(3)]
    compare(call, [rows[0], leaf(shape[-1], seed=3), *rows[1:], leaf(shape[-2], seed=4)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("shape", [(4, 2048, 16, 48), (2, 700, 4, 192), (3, 65, 2, 20), (64, 1, 8, 128)], ids=str)
def test_gated_writes(shape, gain, dtype):
    """Gates in float32, as layers have them."""

    def call(*given: Tensor, backend: str) -> list[Tensor]:
        return [x for x in gated_writes(*given, backend=backend) if x is not None]

    of_gain = [leaf(*shape, dtype=dtype, seed=2), leaf(*shape[:-1], seed=3)] if gain else []
    compare(call, [leaf(*shape, dtype=dtype), leaf(*shape[:-1], seed=1), *of_gain], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("shape", [(8, 2048, 1024), (3, 700, 96), (1, 300, 4096), (64, 1, 1024)], ids=str)
def test_residual_norm(shape, branch, dtype):
    def call(x: Tensor, weight: Tensor, *added: Tensor, backend: str) -> tuple[Tensor, ...]:
        return residual_norm(x, added[0] if added else None, weight, backend=backend)

    added = [leaf(*shape, dtype=dtype, seed=1)] if branch else []
    compare(call, [leaf(*shape, dtype=dtype), leaf(shape[-1], seed=2), *added], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(8, 2048, 2816), (3, 77, 50)], ids=str)
def test_silu_product(shape, dtype):
    compare(
        lambda z, u, backend: (silu_product(z, u, backend=backend),),
        [leaf(*shape, dtype=dtype, seed=i) for i in range(2)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(8, 2048, 5632), (3, 77, 50)], ids=str)
def test_silu_product_of_halves(shape, dtype):
    compare(lambda x, backend: (silu_product_of_halves(x, backend),), [leaf(*shape, dtype=dtype)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, width", [(1048, 32000), (3, 50257)])
def test_cross_entropy(rows, width, dtype):
    """The loss of rounded logits in float64, and its gradient."""
    z = leaf(rows, width, dtype=dtype)
    target = torch.randint(width, (rows,), device="cuda")
    target[::5] = -100
    exact = z.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    log_sums, losses = cross_entropy_rows(z.detach(), target, -100)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    (dz,) = torch.autograd.grad(wanted.sum() / 2, exact)
    error = cross_entropy_errors(z.detach(), target, log_sums, torch.tensor(0.5, device="cuda"), -100)
    same, whole = cross_entropy_gradients(z.detach().clone(), target, -100)
    torch.testing.assert_close(same, losses, rtol=1e-6, atol=1e-6)
    for found, factor in ((error, 1), (whole, 2)):
        assert found.dtype == dtype
        difference = (found.double() - factor * dz).square().mean().sqrt() / (factor * dz).square().mean().sqrt()
        assert difference <= TOLERANCE[dtype], f"{difference:.1e}"


def test_the_loss_of_an_odd_vocabulary():
    """GPT-2's 50,257 tokens, for whose products zeros stand behind the weight, beside the loss of rounded values in float64."""
    hidden, weight = leaf(300, 64, dtype=torch.bfloat16), leaf(50257, 64, dtype=torch.bfloat16, seed=1)
    target = torch.randint(50257, (300,), device="cuda")
    target[::5] = -100
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target, reduction="sum")
    found = summed_cross_entropy(hidden, weight, target, 128)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-3, atol=0)
    slopes = zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, exact), strict=True)
    for got, right in slopes:
        assert got.is_contiguous() and got.shape == right.shape
        assert (got.double() - right).norm() <= 1e-2 * right.norm()


def test_in_one_graph_and_captured():
    """torch.compile and a replayed CUDA graph give what the eager call gives."""
    x, weight, edges = leaf(1, 500, 256, dtype=torch.bfloat16), leaf(256, 4, seed=1), torch.tensor([0, 200, 500]).cuda()

    def gradients(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        """A result that is kept with its graph would keep nodes of this stream, which a capture cannot wait for."""
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weight])]

    def step(x: Tensor, weight: Tensor) -> list[Tensor]:
        y, _ = short_convolution(x, weight, activation="silu", normalize=64, cu_seqlens=edges)
        y = gated_rms_norm(y.unflatten(2, (4, 64)), weight[:64, 0], y.unflatten(2, (4, 64)))
        return gradients(y, x, weight)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        y, _ = short_convolution(x, weight, activation="silu", normalize=64, cu_seqlens=edges)
        return gated_rms_norm(y.unflatten(2, (4, 64)), weight[:64, 0], y.unflatten(2, (4, 64)))

    wanted = step(x, weight)
    torch.testing.assert_close(gradients(torch.compile(forward, fullgraph=True)(x, weight), x, weight), wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, weight)
    edges.copy_(torch.tensor([0, 300, 500]))  # found in the kernels, not in a table of the time of the capture
    graph.replay()
    for got, new in zip(captured, step(x, weight)):
        torch.testing.assert_close(got, new, rtol=0, atol=0)
