"""The kernels of the memories on a CUDA device: the reference's numbers, the same bits twice, bad numbers kept apart, and
torch.compile, CUDA graphs and other devices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.testing import OpCase, OpInputs
from fastweights.testing.contract.compare import replace_tokens, values_and_gradients
from tests.kernels.cases import KERNEL_CASES, ONE_OF_EACH_FAMILY, SOME

from .judging import Record, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Results = tuple[list[Tensor], list[Tensor]]


def draw(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> tuple[OpCase, OpInputs]:
    case = KERNEL_CASES[name]
    given = {"batch": 1, "time": 300, "heads": 2, "key": 64, "value": 64, **sizes}
    return case, case.draw(dtype=dtype, **given).map(Tensor.cuda)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_odd_sizes(name: str, dtype: torch.dtype, packed: bool, record_property: Record) -> None:
    grouped = {"value_heads": 6} if "v" in KERNEL_CASES[name].tokens else {}
    case, inputs = draw(name, dtype, batch=1 if packed else 3, time=150, key=20, value=37, **grouped)
    edges = torch.tensor([0, 70, 70, 71, 150])
    on_cpu = {"cu_seqlens": edges} if packed else {}
    on_gpu = {"cu_seqlens": edges.cuda()} if packed else {}
    got = values_and_gradients(case, inputs, backend="triton", **on_gpu)
    wanted = values_and_gradients(case, inputs.map(lambda x: x.cpu().double()), backend="reference", **on_cpu)
    judge(name, "triton", dtype, got, wanted, record_property)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_long_sequence_in_segments(name: str, dtype: torch.dtype, record_property: Record) -> None:
    """Against the chunkwise form in float64; two runs give the same bits."""
    width = min(128, KERNEL_CASES[name].spec.backends["triton"].most_channels(dtype) or 128)
    case, inputs = draw(name, dtype, time=4096, key=width, value=width)
    got, again = (values_and_gradients(case, inputs, backend="triton") for _ in range(2))
    for first, second in zip(got, again):
        assert all(torch.equal(a, b) for a, b in zip(first, second))
    judge(
        name,
        "triton",
        dtype,
        got,
        values_and_gradients(case, inputs.map(Tensor.double), backend="torch"),
        record_property,
    )


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_same_bits_in_many_calls(name: str) -> None:
    """A copy that overwrites the operand of a running product changes one call in eight: see `sum_over_values`."""
    case, inputs = draw(name, time=4096, heads=8, key=128, value=128)
    first = values_and_gradients(case, inputs, backend="triton")
    for _ in range(100):
        for xs, ys in zip(first, values_and_gradients(case, inputs, backend="triton"), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("sizes", [(96, 192), (100, 60), (256, 256)], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_other_widths(name: str, sizes: tuple[int, int], record_property: Record) -> None:
    case, inputs = draw(name, key=sizes[0], value=sizes[1])
    got = values_and_gradients(case, inputs, backend="triton")
    wanted = values_and_gradients(case, inputs.map(Tensor.double), backend="torch")
    judge(name, "triton", torch.bfloat16, got, wanted, record_property)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_bad_numbers_stay_with_what_depends_on_them(name: str, bad: float) -> None:
    """One bad number at token 130 of the second row's first head."""
    case, inputs = draw(name, batch=2, key=128, value=128)
    by_channel = "v" not in case.tokens and case.case.options.get("squash") != "none"  # keys and queries by the energy
    clean, _ = case(inputs, backend="triton")
    for token_name, x in inputs.tokens.items():
        if token_name.endswith("g") and bad > 0:
            continue  # a positive g is refused
        broken = x.clone()
        broken[(1, 130, 0, *(min(5, size - 1) for size in x.shape[3:]))] = bad
        o, _ = case(replace_tokens(inputs, **{token_name: broken}), backend="triton")
        kind = case.tokens[token_name]
        last = 131 if token_name in ("q", "mix") else 300
        columns = slice(None)
        if kind == "value gate":  # also the same column of a second output beside the first
            columns = slice(5, None, 128)
        elif kind == "value" or (by_channel and x.ndim == 4):
            columns = slice(5, 6)
        reached = torch.zeros_like(o, dtype=torch.bool)
        reached[1, 130:last, 0, columns] = True
        assert o[reached].isnan().all(), token_name
        if (
            token_name == "g" and x.ndim == 4
        ):  # what comes before in its chunk is computed as with strong decays, so rounds otherwise
            before = o[1, 128:130, 0], clean[1, 128:130, 0]
            torch.testing.assert_close(*before, rtol=0.02, atol=0.02 * float(clean.abs().max()))
            reached[1, 128:130, 0] = True
        assert torch.equal(o[~reached], clean[~reached]), token_name


def step(case: OpCase, inputs: OpInputs, op: object = None, **keywords: Tensor) -> list[Tensor]:
    """Results and the gradients of their sum."""
    o, states = (op or case.op)(**inputs.arguments(), output_final_state=True, **keywords)  # type: ignore[operator]
    results = [o, *(states if isinstance(states, tuple) else (states,))]
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]
    return [*results, *torch.autograd.grad(sum(x.float().square().sum() for x in results), leaves)]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_compiled(name: str, packed: bool) -> None:
    """By inductor, as one graph; under "auto", which takes the kernels on this device."""
    case, inputs = draw(name)
    inputs = inputs.map(Tensor.requires_grad_)
    keywords = {"cu_seqlens": torch.tensor([0, 100, 100, 300]).cuda()} if packed else {}
    torch._dynamo.reset()
    got = step(case, inputs, torch.compile(case.op, fullgraph=True), **keywords)
    wanted = step(case, inputs, backend="triton", **keywords)  # type: ignore[arg-type]
    for found, expected in zip(got, wanted, strict=True):
        assert (found.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_on_a_stream_of_its_own(name: str) -> None:
    """A kind of call that is known from another stream reads what this one has written, and nothing waits for the device."""
    case, inputs = draw(name)
    inputs = inputs.map(Tensor.requires_grad_)
    late = inputs.map(lambda x: torch.zeros_like(x).requires_grad_())
    wanted = step(case, inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)  # some 50 ms
            with torch.no_grad():
                for x, y in zip(late.tokens.values(), inputs.tokens.values()):
                    x.copy_(y)
                for x, y in zip(late.parameters.values(), inputs.parameters.values()):
                    x.copy_(y)
            got = step(case, late)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_in_a_cuda_graph(name: str) -> None:
    """Forward and backward are captured once the tables of their lengths are on the device; a replay takes new numbers."""
    case, inputs = draw(name)
    inputs = inputs.map(Tensor.requires_grad_)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(case, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(case, inputs)
    with torch.no_grad():
        for x in inputs.tokens.values():
            x.mul_(0.9)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(case, inputs)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_on_a_device_that_is_not_the_current_one(name: str) -> None:
    case, inputs = draw(name)
    here = values_and_gradients(case, inputs, backend="triton")
    there = values_and_gradients(case, inputs.map(lambda x: x.to("cuda:1")), backend="triton")
    assert torch.cuda.current_device() == 0
    for xs, ys in zip(here, there):
        assert all(y.device.index == 1 and torch.equal(x, y.to(x.device)) for x, y in zip(xs, ys))
    few = inputs.at((slice(None), slice(0, 3)))
    o, _ = case(few.map(lambda x: x.to("cuda:1")), backend="triton")
    assert torch.equal(o.to("cuda:0"), case(few, backend="triton")[0])
