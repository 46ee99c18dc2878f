"""Every op has a declaration that fits its signature; those that users rely on, a test file and a section in docs/rules.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastweights import ops
from fastweights.ops.framework.checks import CHECKS, Sizes
from fastweights.ops.framework.kernel_backend import kernels
from fastweights.ops.framework.spec import OpSpec, Parameter, Role, Scale, spec_of

from ..public_signatures import DECODING, MEMORIES

ROOT = Path(__file__).parents[2]
TRAILING = {
    "initial_state": None, "output_final_state": False, "cu_seqlens": None, "backend": "auto", "cp_group": None,
}  # fmt: skip
TESTED_WITH = {
    "precondition_keys": "precondition",
    "precondition_queries": "precondition",
    "palimpsa_posterior": "palimpsa",
}


@pytest.fixture(params=ops.OPS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def signature(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(ops.OPS.get(name) or getattr(ops, name)).parameters)


def test_signature_is_that_of_the_declaration(name: str) -> None:
    """The same names, inputs and options each in order, and defaults that the declaration allows."""
    spec, given = spec_of(ops.OPS[name]), signature(name)
    assert list(given)[-len(TRAILING) :] == list(TRAILING)
    assert {x: given[x].default for x in TRAILING} == TRAILING
    own = [x for x in given if x not in TRAILING]
    assert [x for x in own if x in spec.inputs] == list(spec.inputs)
    assert [x for x in own if x in spec.options] == list(spec.options)
    assert len(own) == len(spec.inputs) + len(spec.options)
    for x, role in spec.inputs.items():
        if isinstance(role, Role):
            assert given[x].default is (None if role.optional else inspect.Parameter.empty), x
        elif given[x].default is not inspect.Parameter.empty:
            assert given[x].default > role.above, x
    for x, option in spec.options.items():
        assert given[x].kind is inspect.Parameter.KEYWORD_ONLY, x
        CHECKS[type(option)](x, given[x].default, option, Sizes(1, 1, 1, 1, 1, 1))


def test_in_place_op_takes_what_its_op_takes() -> None:
    for name in DECODING:
        own = [x for x in signature(name) if x not in ("state", "state_indices", "cu_seqlens", "backend")]
        assert own == [x for x in signature(name[:-1]) if x not in TRAILING]


def test_declaration_is_complete(name: str) -> None:
    spec = spec_of(ops.OPS[name])
    assert spec.name == name and spec.equation and spec.cases
    assert {"reference", "torch"} <= set(spec.backends)
    assert all(isinstance(role, (Role, Parameter)) for role in spec.inputs.values())
    assert any(isinstance(option, Scale) for option in spec.options.values()) == ("scale" in spec.options)


def test_declaration_names_what_it_has(name: str) -> None:
    """NaN comes from inputs and states of the op; cases give inputs and options in a form that is allowed."""
    spec: OpSpec = spec_of(ops.OPS[name])
    known = {*spec.inputs, *spec.states, "beta"}  # a memory of ridge regression may have no gain
    for result in (*spec.states.values(), *spec.outputs.values()):
        assert set(result.depends_on or ()) <= known
    for case in spec.cases.values():
        for x, dims in case.given.items():
            role = spec.inputs[x]
            assert isinstance(role, Role) and dims in role.dims, x
        assert set(case.options) | set(case.measured) <= {*spec.options, *spec.parameters}


@pytest.mark.parametrize("name", MEMORIES)
def test_op_has_a_test_file(name: str) -> None:
    assert (ROOT / "tests" / "ops" / f"test_{TESTED_WITH.get(name, name)}.py").exists()


@pytest.mark.parametrize("name", MEMORIES)
def test_documentation_has_the_op(name: str) -> None:
    """One section whose heading names it, with its source and its cost."""
    text = (ROOT / "docs" / "rules.md").read_text()
    sections = [part for part in re.split(r"^## ", text, flags=re.M) if f"`{name}`" in part.splitlines()[0]]
    assert len(sections) == 1, name
    assert "Source" in sections[0] and "cost" in sections[0].lower()


def test_documented_costs_are_those_of_the_declarations() -> None:
    """The formulas of docs/rules.md at some sizes, r iterations and chunks of C tokens."""
    text = (ROOT / "docs" / "rules.md").read_text()
    formulas: dict[str, Any] = {
        "linear_attention": (r"2 K V + C (K + V) / 2", lambda K, V, C: 2 * K * V + C * (K + V) / 2),
        "delta_rule": (r"3 K V + C (K + V) + C^2 / 6", lambda K, V, C: 3 * K * V + C * (K + V) + C**2 / 6),
        "precondition_keys": (r"C K / 2", lambda K, V, C: C * K / 2),
    }
    for name, (written, cost) in formulas.items():
        macs = spec_of(getattr(ops, name)).macs
        assert f"`{written}`" in text and macs is not None
        for K, V in ((64, 64), (128, 32)):
            assert macs(K, V) == cost(K, V, 64), name


def functions() -> list[tuple[str, ast.FunctionDef]]:
    files = sorted((ROOT / "fastweights" / "ops").rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def test_no_long_parameter_list_is_repeated() -> None:
    """No list of more than 6 names in more than 2 functions."""
    lists: Counter[tuple[str, ...]] = Counter()
    for _, node in functions():
        given = node.args
        names = tuple(
            x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs) if x.arg not in ("self", "ctx")
        )
        if len(names) > 6:
            lists[names] += 1
    assert len(lists) > 10
    assert not {names: count for names, count in lists.items() if count > 2}


def test_names_decide_nothing() -> None:
    for path in sorted((ROOT / "fastweights").rglob("*.py")):
        assert 'endswith("g")' not in path.read_text(), path


def test_kernels_that_declarations_name_exist(name: str) -> None:
    """They are imported at the first launch alone."""
    pytest.importorskip("triton")
    spec = spec_of(ops.OPS[name])
    assert spec.recurrent is None or callable(spec.recurrent.decode)
    form = spec.backends.get("triton")
    if isinstance(form, kernels):
        assert set(form.family.inputs._fields) & set(spec.inputs) and form.family.rule is not None
