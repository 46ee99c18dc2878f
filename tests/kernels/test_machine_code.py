"""Every kernel as GPUs get it, compiled without one: it fits Ampere and Hopper, and hardly leaves the registers of Hopper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from fastweights.testing import OpCase, OpInputs
from tests.ops import test_decoding, test_gated_norm, test_short_convolution
from tests.ops.kernel_launches import recorded

from .cases import KERNEL_CASES

pytestmark = pytest.mark.compiler
SHARED = {
    80: 163 * 1024,
    90: 227 * 1024,
}  # bytes that a program may have (CUDA programming guide, compute capabilities)
# Bytes a thread that registers may not hold. The tiles are those measured on Hopper: on Ampere they need only work.
SPILLS = {80: 640, 90: 16}


def launch(case: OpCase, width: int, time: int, heads: int, with_states: bool) -> None:
    """Forward and backward of the op, on zeros."""
    drawn = case.draw(batch=1, time=1, heads=heads, key=width, value=width)
    tokens = {name: torch.zeros(1, time, *x.shape[2:], dtype=torch.bfloat16) for name, x in drawn.tokens.items()}
    inputs = OpInputs(tokens, {name: torch.zeros(heads) for name in case.parameters}).map(Tensor.requires_grad_)
    keywords = {}
    if with_states:
        shapes = {"S": (1, heads, width, width), "A": (1, heads, width)}
        states = tuple(torch.zeros(shapes[name]).requires_grad_() for name in case.states)
        keywords = {"initial_state": case.initial_state(states), "output_final_state": True}
    o, state = case.op(**inputs.arguments(), **keywords, backend="triton")
    states = state if isinstance(state, tuple) else () if state is None else (state,)
    torch.autograd.backward([o, *states], [torch.zeros_like(x) for x in (o, *states)])


@pytest.fixture(autouse=True)
def on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops let their kernels have these, as they do in the interpreter."""
    monkeypatch.setattr("fastweights.ops._fused.INTERPRETED", True)


@pytest.fixture(autouse=True)
def tiles_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as that GPU gets them."""
    roomy = request.getfixturevalue("capability") >= 90
    monkeypatch.setattr("fastweights.ops._triton.plan.is_roomy", lambda device: roomy)


def compile_all(launches: Iterable[Callable[[], object]], capability: int) -> None:
    kernels = {one.key: one for call in launches for one in recorded(call)}
    assert kernels
    wrong = []
    for one in kernels.values():
        shared, stack = one.compile(capability)
        if shared > SHARED[capability] or stack > SPILLS[capability]:
            wrong.append(f"{one.kernel.__name__}: {shared} bytes of shared memory, {stack} spilled; {one.choices}")
    assert not wrong, "\n".join(wrong)


# Compiling takes seconds a kernel: forms that together hold every kernel, and fewer for the other width and GPU.
CHOSEN = [
    ("linear_attention-head", 128, 90),
    ("delta_rule-head-write", 128, 90),
    ("preconditioned_delta_rule-channel", 128, 90),
    ("delta_rule-head", 64, 90),
    ("delta_rule-head", 128, 80),
]


@pytest.mark.parametrize(("name", "width", "capability"), CHOSEN)
def test_memory(name: str, width: int, capability: int) -> None:
    """Sequences walked whole, and one in segments with states before and after."""
    case = KERNEL_CASES[name]
    whole = partial(launch, case, width, time=256, heads=8, with_states=False)
    in_segments = partial(launch, case, width, time=4096, heads=2, with_states=True)
    compile_all([whole, in_segments], capability)


@pytest.mark.parametrize("capability", [90])
@pytest.mark.parametrize(
    "module",
    [test_decoding, test_short_convolution, test_gated_norm],
    ids=["decoding", "short_convolution", "gated_norm"],
)
def test_around(module, capability: int) -> None:
    compile_all(module.launches(), capability)
