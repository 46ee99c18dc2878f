"""The preconditioned delta rule: write keys from the energy of the keys, and a delta rule that writes along them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import delta_rule, precondition_keys, preconditioned_delta_rule
from fastweights.testing import CASES

backends = pytest.mark.parametrize("backend", ["reference", "torch"])
forms = pytest.mark.parametrize("form", ["none", "head", "channel"])
EXACT = {"rtol": 1e-10, "atol": 1e-11}
OF_THE_ENERGY = ("precond_g", "precond_beta", "center")


def draw(form: str = "none", **sizes: int) -> dict[str, Tensor]:
    inputs = CASES[f"preconditioned_delta_rule-{form}"].draw(**sizes)
    return {**inputs.tokens, **inputs.parameters}


def draw_states(heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    S = torch.randn(2, heads, 8, 6, dtype=torch.float64, generator=generator)
    return S, torch.rand(2, heads, 8, dtype=torch.float64, generator=generator)


def run(x: dict[str, Tensor], backend: str, **options: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    o, states = preconditioned_delta_rule(**x, output_final_state=True, backend=backend, **options)
    assert states is not None
    return o, states


def delta_inputs(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y for name, y in x.items() if name not in OF_THE_ENERGY}


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    def numbers(*rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64)[None, :, None]

    x = {"q": numbers([1.0], [1.0]), "k": numbers([2.0], [1.0]), "v": numbers([7.0], [5.0]), "beta": numbers(0.5, 1.0)}
    x |= {"precond_g": numbers(math.log(0.5), -math.inf), "precond_beta": numbers(0.25, 1.0)}
    start = torch.tensor([[[[3.0]]]], dtype=torch.float64), torch.tensor([[[4.0]]], dtype=torch.float64)
    o, (S, A) = run(x, backend, center=0.2, bound=2.0, eps=0.5, scale=1.0, initial_state=start)
    factors = []
    for energy in (0.5 * 4 + 0.25 * 4, 1.0):
        r = math.log(energy + 0.5) - 0.2
        factors.append(2.0 ** (-r / (1 + abs(r))))
    first = 3 + 0.5 * 2 * factors[0] * (7 - 2 * 3)
    second = first + factors[1] * (5 - first)
    torch.testing.assert_close(o.flatten().tolist(), [first, second])
    torch.testing.assert_close((S.item(), A.item()), (second, 1.0))


@backends
@forms
@pytest.mark.parametrize("value_heads", [2, 6])
def test_it_is_the_preconditioner_and_then_the_delta_rule(form: str, value_heads: int, backend: str) -> None:
    x, (S, A) = draw(form, time=70, value_heads=value_heads), draw_states(value_heads)
    got = run(x, backend, bound=1.8, eps=1e-3, scale=0.7, initial_state=(S, A))
    options = {"output_final_state": True, "backend": backend}
    gates = {"g": x["precond_g"], "beta": x["precond_beta"], "center": x["center"]}
    write_key, A = precondition_keys(x["k"], **gates, bound=1.8, eps=1e-3, initial_state=A, **options)
    o, S = delta_rule(**delta_inputs(x), write_key=write_key, scale=0.7, initial_state=S, **options)
    torch.testing.assert_close(got, (o, (S, A)), **EXACT)


@backends
@forms
def test_bound_1_is_the_delta_rule(form: str, backend: str) -> None:
    x, (S, A) = draw(form, time=70), draw_states()
    o, (final, _) = run(x, backend, bound=1.0, initial_state=(S, A))
    wanted = delta_rule(**delta_inputs(x), initial_state=S, output_final_state=True, backend=backend)
    torch.testing.assert_close((o, final), wanted, **EXACT)
    assert (run(x, backend, bound=1.5, initial_state=(S, A))[0] - o).norm() > 1e-2 * o.norm()


@backends
def test_the_two_memories_have_decays_and_gains_of_their_own(backend: str) -> None:
    x, (S, A) = draw("head", time=70), draw_states()
    _, (memory, energy) = run(x, backend, initial_state=(S, A))

    def changed(**gates: float) -> tuple[Tensor, Tensor]:
        return run({**x, **{n: torch.full_like(x[n], y) for n, y in gates.items()}}, backend, initial_state=(S, A))[1]

    forgetful = changed(g=-math.inf)
    assert forgetful[0].norm() < 0.9 * memory.norm()
    torch.testing.assert_close(forgetful[1], energy, **EXACT)
    forgetful = changed(precond_g=-math.inf)[1]
    torch.testing.assert_close(forgetful, x["precond_beta"][:, -1, :, None] * x["k"][:, -1].square(), **EXACT)
    silent = changed(beta=0.0)
    torch.testing.assert_close(silent, (x["g"].sum(1).exp()[..., None, None] * S, energy), **EXACT)
    deaf = changed(precond_beta=0.0)[1]
    torch.testing.assert_close(deaf, x["precond_g"].sum(1).exp()[..., None] * A, **EXACT)


@backends
def test_loud_keys_are_written_less(backend: str) -> None:
    """From an empty memory the first write is beta w v^T: as long as the write key, which energy makes shorter."""
    x, (S, _) = draw(time=1), draw_states()
    writes = []
    for energy in (1e-3, 1.0, 1e3):
        A = torch.full((2, 2, 8), energy, dtype=torch.float64)
        writes.append(run(x, backend, initial_state=(0 * S, A))[1][0].abs())
    assert (writes[0] > writes[1]).all() and (writes[1] > writes[2]).all()
    assert (writes[0] < 1.5**2 * writes[2]).all()


@backends
def test_gains_and_decays_of_key_heads_serve_their_value_heads(backend: str) -> None:
    x = draw("head", time=20, heads=2, value_heads=6)
    names = ("beta", "g", "precond_g", "precond_beta")
    few = {**x, **{name: x[name][:, :, ::3] for name in names}}
    many = {**x, **{name: few[name].repeat_interleave(3, 2) for name in names}}
    torch.testing.assert_close(run(few, backend), run(many, backend), **EXACT)
