"""An op as an object: its declaration, the size of its state, and its form that updates the state in place."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.ops import delta_rule, delta_rule_, lattice_, recursive_least_squares_, variational_linear_attention_
from fastweights.ops.authoring import (
    Case,
    Chunks,
    Op,
    OpSpec,
    Output,
    Sequences,
    State,
    call,
    chunkwise,
    count_numbers,
    format_numbers,
    op,
    roles,
    sequential,
    spec_of,
    stack_time,
)
from fastweights.testing import CASES, OpCase

OPS = [name for name in ops.OPS if hasattr(ops, name)]  # of the library


def by_tokens(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    outputs = []
    for t in range(v.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)


SPEC = OpSpec(
    name="sum_of_products",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE},
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(by_tokens), "torch": sequential(by_tokens)},
    cases={"": Case()},
    equation="S = S + k v^T; o = S^T q",
)


@op(SPEC)
def sum_of_products(
    q, k, v, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, backend="auto"
):
    """A rule of a user's own."""
    return call(SPEC, (q, k, v), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend)


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_a_function_that_knows_its_declaration(name: str) -> None:
    rule = getattr(ops, name)
    assert isinstance(rule, Op) and rule.spec.name == name and spec_of(rule) is rule.spec
    own = inspect.cleandoc(rule.function.__doc__)
    assert rule.__name__ == name and inspect.isroutine(rule)
    if "\nArgs:\n" in own:  # an op of another package may not list them
        before, of_group, after = re.split(r"(\n    cp_group: [^:]+.*?)(?=\n\nReturns:)", rule.__doc__, flags=re.DOTALL)
        assert before + after == own and "ProcessGroup" in of_group
    *given, (last, group) = inspect.signature(rule).parameters.items()
    assert dict(given) == inspect.signature(rule.function).parameters and (last, group.default) == ("cp_group", None)
    assert pickle.loads(pickle.dumps(rule)) is copy.deepcopy(rule) is rule


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_size_of_the_state_is_what_a_call_leaves(case: OpCase) -> None:
    inputs = case.draw(batch=1, time=3, heads=1, value_heads=2)
    _, states = case(inputs)
    key, value = inputs.tokens["k"].shape[-1], inputs.tokens.get("v", inputs.tokens["k"]).shape[-1]
    held = sum(state[0].numel() for state in states if state.is_floating_point())
    assert ops.OPS[case.spec.name].state_size(2, key, value) == held


@pytest.mark.parametrize(("sizes", "name"), [((0, 4, 4), "heads"), ((2, -1, 4), "key"), ((2, 4, 0), "value")])
def test_size_of_the_state_needs_sizes(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        delta_rule.state_size(*sizes)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (["GKV"], "H K V"),
        (["GKV", "GKV"], "2 H K V"),
        (["GKV", "GK"], "H K (V + 1)"),
        (["GK", "GKV"], "H K (V + 1)"),
        (["GKK", "GKV"], "H K (V + K)"),
        (["GKV", "GKK", "GK", ""], "H K (V + K + 1)"),
        (["GKV", "GK", "GK"], "H K (V + 2)"),
        (["GKV", "G"], "H (K V + 1)"),
        (["GK"], "H K"),
        (["GV", "GKV"], "H V (K + 1)"),
        (["GKV", "GKV", "GK"], "H K (2 V + 1)"),
    ],
)
def test_numbers_of_states_in_letters(dims: list[str], text: str) -> None:
    states = [State(one, counts=not one) for one in dims]
    assert format_numbers(states) == text
    product = text.replace(" + ", "+").replace("(", "*(").replace(" ", "*").replace("**", "*")
    assert eval(product, {"H": 2, "K": 3, "V": 5}) == count_numbers(states, 2, 3, 5)


def test_an_op_stays_itself_as_an_attribute_of_a_class() -> None:
    class Holder:
        rule = delta_rule

    assert Holder().rule is Holder.rule is delta_rule


def test_a_function_without_a_declaration_is_refused() -> None:
    with pytest.raises(TypeError, match=r"op must be an op with a declaration, got sqrt; put @op\(SPEC\)"):
        spec_of(math.sqrt)


def test_the_decorator_needs_a_declaration_that_fits() -> None:
    with pytest.raises(TypeError, match=r"spec must be the OpSpec of the rule, got function; write @op\(SPEC\)"):
        op(by_tokens)  # type: ignore[arg-type]

    def without_scale(q, k, v, *, initial_state=None, output_final_state=False, cu_seqlens=None):
        raise AssertionError

    with pytest.raises(
        ValueError, match="without_scale must take scale, backend, as the declaration of 'sum_of_products'"
    ):
        op(SPEC)(without_scale)


def test_names_of_the_ops_in_place() -> None:
    named = [op.in_place for name, op in ops.OPS.items() if hasattr(ops, f"{name}_")]
    assert len(named) > 10
    for form in named:
        assert form is getattr(ops, form.__name__)
        assert pickle.loads(pickle.dumps(form)) is form


def test_in_place_gets_its_signature_from_the_op() -> None:
    given = inspect.signature(delta_rule_)
    of_op = [
        name
        for name in inspect.signature(delta_rule).parameters
        if name not in ("initial_state", "output_final_state", "cp_group")
    ]
    assert list(given.parameters) == [*of_op[:-2], "state", "state_indices", *of_op[-2:]]
    assert (
        given.parameters["state"].annotation == "Tensor"
        and given.parameters["state"].default is inspect.Parameter.empty
    )
    assert given.return_annotation == "Tensor"
    assert inspect.signature(ops.palimpsa_posterior_).return_annotation == "tuple[Tensor, Tensor]"
    assert inspect.signature(ops.palimpsa_).parameters["state"].annotation == "tuple[Tensor, Tensor]"


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        (delta_rule_, [r"$$S' = \mathrm{Diag}(a_t)", "state: S [N, HV, K, V], float32", "Begin with zeros."]),
        (lattice_, ["Begin with the first K rows of the identity."]),
        (
            recursive_least_squares_,
            ["(S [N, HV, K, V], P [N, HV, K, K])", "(zeros, I / ridge)", "takes no g, at most 128 key"],
        ),
        (variational_linear_attention_, ["count [N] in int64"]),
        (sum_of_products.in_place, ["    S = S + k v^T; o = S^T q", 'or "auto", which is "torch".']),
    ],
)
def test_in_place_gets_its_docstring_from_the_op(form: Any, parts: list[str]) -> None:
    text = " ".join(form.__doc__.split())
    for part in parts:
        assert " ".join(part.split()) in text
    assert [line for line in form.__doc__.splitlines() if line.endswith(":")] == ["Args:", "Returns:", "Raises:"]
    assert max(map(len, form.__doc__.splitlines())) <= 130


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_rule_of_ones_own_decodes_in_place(backend: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 1, 3, dtype=torch.float64)
    S = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    wanted, final = sum_of_products(q, k, v, initial_state=S, output_final_state=True, backend=backend)
    pool, held = torch.stack([S[1], 7 * S[0], S[0]]), S.clone()
    rows = torch.tensor([2, 0])
    assert torch.equal(sum_of_products.in_place(q, k, v, state=held, backend=backend), wanted) and torch.equal(
        held, final
    )
    assert torch.equal(sum_of_products.in_place(q, k, v, state=pool, state_indices=rows, backend=backend), wanted)
    assert torch.equal(pool[rows], final) and torch.equal(pool[1], 7 * S[0])
    with pytest.raises(ValueError, match="state must have shape"):
        sum_of_products.in_place(q, k, v, state=S[0])


@pytest.mark.parametrize("name", ["initial_state", "output_final_state", "step"])
def test_in_place_takes_nothing_else(name: str) -> None:
    q, S = torch.randn(2, 4, 1, 3), torch.zeros(2, 1, 3, 3)
    with pytest.raises(TypeError, match=name):
        sum_of_products.in_place(q, q, q, state=S, **{name: None})
    with pytest.raises(TypeError, match="state"):
        sum_of_products.in_place(q, q, q)


def count_by_tokens(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    return v + (S[..., 0, :] * 0)[:, None], (S + v.shape[1],)


def count_by_chunks(q: Tensor, k: Tensor, v: Tensor, S: Tensor, sequences: Sequences) -> tuple[Tensor, tuple[Tensor]]:
    """A rule that adds 1 to its state at every token, which padding would do too: the mask leaves padding out."""
    chunks = Chunks(sequences, 8, v.device)
    real = chunks.split(torch.ones_like(v[..., :1]))
    _, (S,) = chunks.scan(lambda states, parts: (states[0] + parts[0],), (S,), real.sum(2)[..., None])
    return v + 0.0, (S,)


def test_a_mask_keeps_padding_out_of_a_state() -> None:
    """As docs/own_rule.md says it of rules that padding would change."""
    spec = OpSpec(
        name="count_of_tokens",
        inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE},
        states={"S": State("GKV")},
        outputs={"o": Output("GV")},
        backends={"reference": sequential(count_by_tokens), "torch": chunkwise(count_by_chunks)},
    )
    q, edges = torch.randn(1, 30, 2, 3), torch.tensor([0, 5, 5, 22, 30])
    for cu_seqlens, counts in ((None, [30]), (edges, [5, 0, 17, 8])):
        for backend in ("reference", "torch"):
            _, S = call(spec, (q, q, q), {}, None, True, cu_seqlens, backend)
            assert S[:, 0, 0, 0].tolist() == counts
