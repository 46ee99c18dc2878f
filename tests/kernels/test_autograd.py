"""How the kernels take part in autograd and torch.compile, and when the decoding kernel serves in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.framework.kernel_backend import kernels
from fastweights.testing import OpCase
from fastweights.testing.contract.compare import assert_close, relative_error, values_and_gradients
from tests.fast_set import slow

from .cases import (
    DEVICE,
    KERNEL_CASES,
    ONE_OF_EACH_FAMILY,
    draw_states,
    exact,
    others_slow,
    small,
    some_cases,
    some_slow,
)

pytestmark = pytest.mark.kernels


def leaves_of(inputs) -> list[Tensor]:
    return [*inputs.tokens.values(), *inputs.parameters.values()]


@some_cases
def test_second_derivative_is_refused(case: OpCase) -> None:
    inputs = small(case, 5).map(Tensor.requires_grad_)
    o, _ = case(inputs, backend="triton")
    (gradient,) = torch.autograd.grad(o.square().sum(), inputs.tokens["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
def test_only_what_is_asked_for(case: OpCase) -> None:
    """One leaf at a time, and a loss of one result at a time, the states among them."""
    inputs = small(case, 20)
    states = draw_states(case, inputs, 1)
    (_, *finals), gradients = exact(case, inputs, states)
    for name, x in inputs.tokens.items():
        leaf = x.clone().requires_grad_()
        o, final = case.op(
            **{**inputs.arguments(), name: leaf}, initial_state=case.initial_state(states), output_final_state=True,
            backend="triton",
        )  # fmt: skip
        final = final if isinstance(final, tuple) else (final,)
        wanted_leaf = x.cpu().double().requires_grad_()
        wanted = case.op(
            **{**inputs.map(lambda x: x.cpu().double()).arguments(), name: wanted_leaf},
            initial_state=case.initial_state(tuple(s.cpu().double() for s in states)), output_final_state=True,
            backend="reference",
        )  # fmt: skip
        wanted_results = (wanted[0], *(wanted[1] if isinstance(wanted[1], tuple) else (wanted[1],)))
        for result, wanted_result in zip((o, *final), wanted_results):
            if not wanted_result.requires_grad:
                continue
            got = torch.autograd.grad(result.sum(), leaf, retain_graph=True)[0]
            want = torch.autograd.grad(wanted_result.sum(), wanted_leaf, retain_graph=True, materialize_grads=True)[0]
            assert float((got.cpu() - want).norm()) <= 1e-5 * max(float(want.norm()), 1e-3), name


@some_slow("preconditioned_delta_rule-channel")
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_activation_checkpointing(case: OpCase, reentrant: bool) -> None:
    inputs = small(case, 20)
    plain, wanted = values_and_gradients(case, inputs, backend="triton")
    inputs = inputs.map(lambda x: x.detach().requires_grad_())
    names = [*inputs.tokens, *inputs.parameters]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        o, states = case.op(**dict(zip(names, values)), output_final_state=True, backend="triton")
        return (o, *(states if isinstance(states, tuple) else (states,)))

    results = checkpoint(call, *leaves_of(inputs), use_reentrant=reentrant)
    generator = torch.Generator().manual_seed(1)  # as values_and_gradients draws
    towards = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    torch.autograd.backward(results, towards)
    assert all(torch.equal(a, b) for a, b in zip(results, plain))
    assert_close([x.grad for x in leaves_of(inputs)], wanted, 1e-6)


@some_slow("linear_attention-none", "preconditioned_delta_rule-channel", "precondition_keys")
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "packed"])
def test_fullgraph(case: OpCase, packed: bool) -> None:
    """torch.compile takes the op as one node, changes no number, and holds for another length."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **arguments: case.op(**arguments, output_final_state=True, backend="triton"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    for time in (30,) if packed else (70, 30):
        inputs = small(case, time).map(Tensor.requires_grad_)
        arguments = inputs.arguments()
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, 20, time])
        o, states = compiled(**arguments)
        wanted, wanted_states = case.op(**arguments, output_final_state=True, backend="triton")
        got, want = ([x, *(s if isinstance(s, tuple) else (s,))] for x, s in ((o, states), (wanted, wanted_states)))
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        gradients = [torch.autograd.grad(sum(x.sum() for x in xs), leaves_of(inputs)) for xs in (got, want)]
        assert_close(*gradients, 1e-6)


@pytest.mark.parametrize(
    "name",
    slow(*ONE_OF_EACH_FAMILY),
)
def test_symbolic_sizes(name: str) -> None:
    """With dynamic=True a head's width is a symbol too, and kernels are compiled for numbers."""
    torch._dynamo.reset()
    case = KERNEL_CASES[name]
    options = {name: x for name, x in small(case, 1).arguments().items() if not isinstance(x, Tensor)}
    compiled = torch.compile(
        lambda **tensors: case.op(**tensors, **options, backend="triton")[0], fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    for time, width in ((20, 8), (30, 16)):
        inputs = small(case, time, key=width, value=width).map(Tensor.requires_grad_)
        o = compiled(**{name: x for name, x in inputs.arguments().items() if isinstance(x, Tensor)})
        wanted = case(inputs, backend="triton")[0]
        assert torch.equal(o, wanted)
        assert_close(*(torch.autograd.grad(y.sum(), leaves_of(inputs)) for y in (o, wanted)), 1e-6)


@some_slow("linear_attention-none", "preconditioned_delta_rule-channel", "precondition_keys")
def test_opcheck(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node and its backward are what torch.library expects of an op."""
    calls: list[tuple[Any, list[Any], list[Any]]] = []
    plain = kernels.run

    def record(self: kernels, x: Any) -> Any:
        tensors = [*x.inputs.values(), *x.states.values(), x.cu_seqlens]
        calls.append((self.node, tensors, [*x.options.values(), x.final]))
        return plain(self, x)

    monkeypatch.setattr(kernels, "run", record)
    case(
        small(case, 20).map(Tensor.requires_grad_), backend="triton", cu_seqlens=torch.tensor([0, 5, 20], device=DEVICE)
    )
    ((node, tensors, options),) = calls
    utilities = ("test_schema", "test_faketensor")
    leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    torch.library.opcheck(node.op, (*leaves, *options), test_utils=(*utilities, "test_autograd_registration"))
    results = [t.detach() for t in node.op(*leaves, *options)]
    output_grads = [torch.ones_like(t) for t in results[: node.outputs]]
    needed = [t is not None and t.requires_grad for t in leaves]
    given = [t if t is None else t.detach() for t in leaves]
    saved = results[node.outputs :]
    torch.library.opcheck(node.backward_op, (*given, *options, saved, output_grads, needed), test_utils=utilities)


def test_compiled_without_gradients() -> None:
    case = KERNEL_CASES["preconditioned_delta_rule-head"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda **x: case.op(**x, backend="triton")[0], fullgraph=True, backend="aot_eager")
    inputs = small(case, 20)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs.arguments()), case(inputs, backend="triton")[0])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Tensor]]:
    """Calls of the decoding kernel."""
    from fastweights.ops.framework.few_tokens import recurrent

    calls: list[Callable[..., Tensor]] = []
    plain = recurrent.run
    monkeypatch.setattr(recurrent, "run", lambda *args: calls.append(plain) or plain(*args))
    return calls


@others_slow("linear_attention-none", "delta_rule-head-write", "precondition_keys")
def test_a_few_tokens_without_gradients_are_decoded(case: OpCase, decoded: list) -> None:
    """At most 16 of a row, and of packed sequences at most two each on average. The states given are kept, unless the caller
    says that they are its own."""
    if case.spec.recurrent is None:
        pytest.skip("has no kernel for a few tokens")
    inputs = small(case, 20, heads=1, value_heads=2)
    kinds = case.spec.states.values()
    # A sequence without tokens keeps a matrix that is not symmetric; a backend does not.
    drawn = draw_states(case, inputs, 10)
    states = tuple((s + s.mT) / 2 if kind.symmetric else s for s, kind in zip(drawn, kinds, strict=True))
    edges = torch.tensor([0, 5, 5, 6, 6, 6, 6, 6, 6, 7, 20])
    given = tuple(s.clone() for s in states)
    o, final = case(inputs, backend="triton", initial_state=case.initial_state(given), cu_seqlens=edges)
    assert all(torch.equal(a, b) for a, b in zip(given, states))
    wanted, _ = exact(case, inputs, states, cu_seqlens=edges)
    assert all(relative_error(a, b) <= 1e-5 for a, b in zip((o, *final), wanted, strict=True))

    with overwriting_states():
        _, again = case(inputs, backend="triton", initial_state=case.initial_state(given), cu_seqlens=edges)
    assert all(a.data_ptr() == b.data_ptr() and torch.equal(a, c) for a, b, c in zip(again, given, final, strict=True))
    assert len(decoded) == 2

    row = inputs.at((slice(None), slice(0, 3)))
    wanted, _ = exact(case, row)
    o, final = case(row, backend="triton")
    assert all(relative_error(a, b) <= 1e-5 for a, b in zip((o, *final), wanted, strict=True))
    assert len(decoded) == 3 or not case.spec.recurrent.starts


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
def test_others_are_not_decoded(case: OpCase, decoded: list) -> None:
    inputs = small(case, 17)
    case(inputs, backend="triton")
    case(inputs, backend="triton", cu_seqlens=torch.tensor([0, 5, 10, 11, 12, 13, 14, 15, 17]))
    case(inputs.at((slice(None), slice(0, 4))).map(lambda x: x.clone().requires_grad_()), backend="triton")
    assert not decoded
