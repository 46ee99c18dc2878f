"""The ops that have kernels, and what their tests share.

The kernels run on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1 before pytest), where they are slow: sizes are
small, and a chunk of 64 tokens and one head more is time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED
from fastweights.testing import CASES, OpCase, OpInputs
from fastweights.testing.contract.by_kernels import DEVICE, draw_small
from fastweights.testing.contract.compare import assert_close, values_and_gradients

from .interpreter import remember_builtins

if HAS_TRITON and INTERPRETED:
    remember_builtins()


def has_kernels(case: OpCase) -> bool:
    """Whether the kernels serve this form whole: with a decay the P of recursive least squares stays with PyTorch."""
    with_decay = case.spec.name == "recursive_least_squares" and "g" in case.case.given
    return case.has_kernels and not with_decay


KERNEL_CASES = {name: case for name, case in CASES.items() if has_kernels(case)}
# One of each kind, for what does not depend on the form.
SOME = [
    "linear_attention-none",
    "delta_rule-head-write",
    "preconditioned_delta_rule-channel",
    "precondition_keys",
]
ONE_OF_EACH_FAMILY = [
    *SOME, "elementwise_longhorn", "palimpsa", "lattice-decode", "lattice-encode-decay", "output_normalized_ttt",
    "gated_kalmanet-chebyshev", "mesa", "recursive_least_squares-none", "variational_linear_attention-refresh",
]  # fmt: skip
# Token after token, or iteration after iteration, so that the interpreter takes seconds: test_elementwise.py, test_posterior.py,
# test_sphere.py, test_output_normalized_ttt.py, test_inverse_gram.py and test_ridge.py have the fast tests of these.
STEP_BY_STEP = (
    "elementwise_longhorn",
    "palimpsa",
    "lattice",
    "output_normalized_ttt",
    "recursive_least_squares",
    "variational_linear_attention",
    "gated_kalmanet",
    "mesa",
)
SLOW = [name for name, case in KERNEL_CASES.items() if case.spec.name.startswith(STEP_BY_STEP)]
# Other forms, whose kernels a form with more inputs launches as well.
REPEATED = (
    *("linear_attention-head", "delta_rule-none", "delta_rule-none-write", "delta_rule-head", "delta_rule-channel"),
    *("delta_product-none", "delta_product-head", "dplr_delta_rule-none", "precondition_keys-tanh"),
    *("precondition_keys-unstable", "preconditioned_delta_rule-none", "preconditioned_delta_rule-head"),
)

some_cases = pytest.mark.parametrize("case", [KERNEL_CASES[name] for name in SOME], ids=SOME)


def others_slow(*fast: str) -> pytest.MarkDecorator:
    """All forms named here, and in the slow set the others: in the interpreter they take minutes."""

    def one(name: str) -> Any:
        return pytest.param(KERNEL_CASES[name], id=name, marks=() if name in fast else pytest.mark.slow)

    return pytest.mark.parametrize("case", [one(name) for name in KERNEL_CASES])


def some_slow(*slow: str) -> pytest.MarkDecorator:
    """One form of each kind, those named here in the slow set."""

    def one(name: str) -> Any:
        return pytest.param(KERNEL_CASES[name], id=name, marks=pytest.mark.slow if name in slow else ())

    return pytest.mark.parametrize("case", [one(name) for name in SOME])


small = draw_small  # one row of one head in float32, unless other sizes are given


def exact(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...] | None = None, **keywords: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients of the reference in float64, on the CPU."""
    if states is not None:
        states = tuple(s.cpu().double() if s.is_floating_point() else s.cpu() for s in states)
    results = values_and_gradients(
        case, inputs.map(lambda x: x.cpu().double()), states, backend="reference", **keywords
    )
    return tuple([x.to(DEVICE) for x in xs] for xs in results)  # type: ignore[return-value]


def check_against_reference(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...] | None, close: float, **keywords: Any
) -> None:
    """Values and gradients of the kernels are those of the reference in float64."""
    got = values_and_gradients(case, inputs, states, backend="triton", **keywords)
    wanted = exact(case, inputs, states, **keywords)
    assert_close(got[0], wanted[0], close)
    assert_close(got[1], wanted[1], close)


def draw_states(case: OpCase, inputs: OpInputs, count: int) -> tuple[Tensor, ...]:
    """float32 states that `count` sequences may be in: S, M and U of any numbers, A and J of positive ones, matrices [K, K]
    positive definite (H in its symmetric part), a count of tokens."""
    generator = torch.Generator().manual_seed(7)
    key = inputs.tokens["k"].shape[-1]
    v = inputs.tokens.get("v")
    heads = max(x.shape[2] for x in inputs.tokens.values())
    S = torch.randn(count, heads, key, 1 if v is None else v.shape[-1], generator=generator)
    root, skew = torch.randn(2, count, heads, key, key, generator=generator)
    matrix = root @ root.mT / key + torch.eye(key)
    of_dims = {"GKK": matrix, "GK": S[..., 0].abs(), "": torch.arange(count)}
    of_name = {"S": S, "M": S, "U": S, "J": S.square(), "H": matrix + 0.1 * (skew - skew.mT)}
    return tuple(of_name.get(name, of_dims.get(state.dims)).to(DEVICE) for name, state in case.spec.states.items())
