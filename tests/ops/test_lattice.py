"""Lattice: the identities of the paper, and what holds at the edges of its domain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, lattice
from fastweights.ops.framework import call
from fastweights.ops.framework.spec import spec_of
from fastweights.ops.lattice.coefficients import Coefficients
from fastweights.ops.lattice.workspace import Workspace
from tests.fast_set import fast_where

OBJECTIVES = ["decode", "encode", "similarity"]
BACKENDS = ["reference", "torch"]

objectives = pytest.mark.parametrize("objective", OBJECTIVES)
backends = pytest.mark.parametrize("backend", BACKENDS)


def draw(
    time: int, *, batch: int = 2, heads: int = 2, key: int = 4, value: int = 6, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(time)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, time, heads, *shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(key).to(dtype),
        "k": F.normalize(normal(key), dim=-1).to(dtype),
        "v": F.normalize(normal(value), dim=-1).to(dtype),
        "gamma": normal().sigmoid().to(dtype),
    }


def draw_state(inputs: dict[str, Tensor], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    (batch, _, heads, value), key = inputs["v"].shape, inputs["k"].shape[3]
    return torch.randn(batch, heads, key, value, generator=generator, dtype=torch.float64).to(inputs["v"].dtype)


def first(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same call on the first token alone."""
    return {name: x[:, :1] for name, x in inputs.items()}


def run(inputs: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    o, S = lattice(**inputs, output_final_state=True, **options)
    assert S is not None
    return o, S


def gradients(inputs: dict[str, Tensor], state: Tensor, **options: object) -> tuple[list[Tensor], list[Tensor]]:
    """(o, S) and the gradients of a fixed linear function of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    begin = state.clone().requires_grad_()
    results = run(leaves, initial_state=begin, **options)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape) for x in results]
    total = sum((w * x).sum() for w, x in zip(weights, results))
    return [x.detach() for x in results], list(torch.autograd.grad(total, [*leaves.values(), begin]))


def loss(objective: str, S: Tensor, k: Tensor, v: Tensor, phi: Callable[[Tensor], Tensor]) -> Tensor:
    """The compression losses, eq. 6, 9 and 11, halved where they are squares."""
    if objective == "decode":
        return ((phi(S).mT @ k[..., None])[..., 0] - v).square().sum() / 2
    answer = (phi(S) @ v[..., None])[..., 0]
    return (answer - k).square().sum() / 2 if objective == "encode" else -(answer * k).sum()


def descend(objective: str, inputs: dict[str, Tensor], S: Tensor, phi: Callable[[Tensor], Tensor]) -> Tensor:
    """The state after one gradient step per token, by automatic differentiation."""
    for t in range(inputs["v"].shape[1]):
        S = S.detach().requires_grad_()
        (step,) = torch.autograd.grad(loss(objective, S, inputs["k"][:, t], inputs["v"][:, t], phi), S)
        S = S - inputs["gamma"][:, t, :, None, None] * step
    return S.detach()


def unit(S: Tensor) -> Tensor:
    return F.normalize(S, dim=-1)


@objectives
@backends
def test_each_step_descends_the_gradient(objective: str, backend: str) -> None:
    inputs = draw(7)
    S = draw_state(inputs)
    _, got = run(inputs, objective=objective, normalize=False, initial_state=S, backend=backend)
    torch.testing.assert_close(got, descend(objective, inputs, S, unit), rtol=1e-10, atol=1e-10)


def test_without_column_normalisation_it_is_the_delta_rule() -> None:
    """Remark 3.3: the same descent on the same loss with the identity in place of phi."""
    inputs = draw(7)
    S = draw_state(inputs)
    _, wanted = delta_rule(
        inputs["q"], inputs["k"], inputs["v"], inputs["gamma"], scale=1.0, initial_state=S, output_final_state=True
    )
    got = descend("decode", inputs, S, lambda S: S)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert (got - descend("decode", inputs, S, unit)).norm() > 0.1


@objectives
def test_the_update_is_orthogonal_to_the_slot(objective: str) -> None:
    """So lengths add up by Pythagoras without normalisation, and eq. 14 gives the factor that normalisation applies."""
    inputs = first(draw(3))
    S = draw_state(inputs)
    _, after = run(inputs, objective=objective, normalize=False, initial_state=S)
    change = after - S
    assert change.norm(dim=-1).min() > 1e-3
    assert (change * S).sum(-1).abs().max() < 1e-13
    torch.testing.assert_close(after.square().sum(-1), S.square().sum(-1) + change.square().sum(-1))
    _, free = run(inputs, objective=objective, normalize=False, initial_state=unit(S))
    _, normalized = run(inputs, objective=objective, initial_state=unit(S))
    beta = (1 + (free - unit(S)).square().sum(-1, keepdim=True)).rsqrt()
    torch.testing.assert_close(normalized, beta * free)


@objectives
@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_slots_stay_on_the_unit_sphere(objective: str, backend: str, dtype: torch.dtype) -> None:
    for time in (1, 33, 200):
        inputs = draw(time, dtype=dtype)
        decay = draw(time, dtype=dtype)["gamma"]
        _, S = run(inputs, objective=objective, decay=decay, initial_state=3 * draw_state(inputs), backend=backend)
        assert (S.norm(dim=-1) - 1).abs().max() < 20 * torch.finfo(dtype).eps


@objectives
def test_more_slots_than_channels(objective: str) -> None:
    inputs = draw(20, key=6, value=3)
    wanted = gradients(inputs, draw_state(inputs), objective=objective, backend="reference")
    got = gradients(inputs, draw_state(inputs), objective=objective)
    for g, w in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]]):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@objectives
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "free"])
@pytest.mark.parametrize("l1", [0.0, 0.05, 0.2])
def test_every_form_with_decay_and_empty_slots(objective: str, normalize: bool, l1: float) -> None:
    """The forms that the contract suite leaves out, from a state with a slot of zeros, across chunk borders."""
    inputs = draw(70, heads=1)
    inputs["decay"] = 0.9 + 0.1 * draw(70, heads=1)["gamma"]
    S = draw_state(inputs)
    S[0, 0, 1] = 0
    options = {"objective": objective, "normalize": normalize, "l1": l1}
    (o, final), wanted = gradients(inputs, S, backend="reference", **options)
    (got_o, got_final), got = gradients(inputs, S, **options)
    assert final[0, 0, 1].abs().max() == 0 and got_final[0, 0, 1].abs().max() == 0
    largest = max(float(w.norm()) for w in wanted)
    for g, w in zip([got_o, got_final, *got], [o, final, *wanted]):
        assert g.isfinite().all()
        assert (g - w).norm() <= 1e-8 * max(float(w.norm()), 1e-3 * largest)


@objectives
@backends
def test_proximal_step(objective: str, backend: str) -> None:
    """Eq. 18: the gradient step, then every number of S pulled to 0 by gamma l1; then normalisation."""
    inputs = first(draw(5))
    S = draw_state(inputs)
    _, plain = run(inputs, objective=objective, normalize=False, initial_state=S, backend=backend)
    threshold = 0.8 * inputs["gamma"][:, 0, :, None, None]
    shrunk = torch.where(plain.abs() > threshold, plain - threshold * plain.sign(), torch.zeros_like(plain))
    assert 0.1 < (shrunk == 0).double().mean() < 0.9
    _, free = run(inputs, objective=objective, normalize=False, l1=0.8, initial_state=S, backend=backend)
    _, normalized = run(inputs, objective=objective, l1=0.8, initial_state=S, backend=backend)
    torch.testing.assert_close(free, shrunk, rtol=1e-12, atol=1e-12)
    assert torch.equal(free == 0, shrunk == 0)
    torch.testing.assert_close(normalized, unit(shrunk), rtol=1e-12, atol=1e-12)


@objectives
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "free"])
def test_a_vanishing_penalty_is_none(objective: str, normalize: bool) -> None:
    inputs = draw(40)
    options = {"objective": objective, "normalize": normalize}
    wanted, got = (gradients(inputs, draw_state(inputs), l1=l1, **options) for l1 in (0.0, 1e-13))
    for g, w in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]]):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


def test_a_penalty_makes_the_memory_sparse_and_may_end_it() -> None:
    inputs = draw(200)
    zeros = [float((run(inputs, l1=l1)[1] == 0).double().mean()) for l1 in (0.0, 0.1, 0.3)]
    assert zeros[0] == 0 and zeros[2] > zeros[1] > 0.05, zeros
    (o, S), found = gradients(inputs, draw_state(inputs), l1=100.0)
    assert o.abs().max() == 0 and S.abs().max() == 0
    assert all(g.isfinite().all() for g in found)


@objectives
@backends
def test_decay(objective: str, backend: str) -> None:
    """1 keeps all; 0 leaves of a slot only what is written, and its direction where nothing is."""
    inputs = draw(20)
    ones, zeros = torch.ones_like(inputs["gamma"]), torch.zeros_like(inputs["gamma"])
    plain, kept = (run(inputs, objective=objective, decay=d, backend=backend)[0] for d in (None, ones))
    torch.testing.assert_close(kept, plain, rtol=1e-13, atol=1e-13)

    token, S = first(inputs), unit(draw_state(inputs))
    options = {"objective": objective, "initial_state": S, "backend": backend}
    _, free = run(token, normalize=False, **options)
    _, written = run(token, decay=zeros[:, :1], normalize=False, **options)
    torch.testing.assert_close(written, free - S, rtol=1e-12, atol=1e-12)
    _, forgotten = run(token, decay=zeros[:, :1], **options)
    torch.testing.assert_close(forgotten, unit(free - S), rtol=1e-9, atol=1e-9)
    _, idle = run({**token, "gamma": zeros[:, :1]}, decay=zeros[:, :1], **options)
    torch.testing.assert_close(idle, S, rtol=1e-12, atol=1e-12)

    some = torch.where(inputs["gamma"] > 0.5, zeros, ones)
    results, found = gradients({**inputs, "decay": some}, S, objective=objective, backend=backend)
    assert all(x.isfinite().all() for x in (*results, *found))


@objectives
def test_nothing_to_write_leaves_the_memory(objective: str) -> None:
    inputs = draw(50)
    S = unit(draw_state(inputs))
    silent = {"decode": {"k": 0}, "encode": {"v": 0}, "similarity": {"k": 0}}[objective]
    for changed in (silent, {"gamma": 0}):
        given = {name: torch.zeros_like(x) if name in changed else x for name, x in inputs.items()}
        (_, final), found = gradients(given, S, objective=objective)
        torch.testing.assert_close(final, S, rtol=1e-13, atol=1e-13)
        assert all(g.isfinite().all() for g in found)


@fast_where(lambda given: given["objective"] == "decode")
@objectives
def test_one_token_many_times(objective: str) -> None:
    """Slots settle where the loss has its minimum on the sphere."""
    once = draw(1, batch=1, heads=1, dtype=torch.float32)
    inputs = {name: x.expand(-1, 10_000, *[-1] * (x.ndim - 2)) for name, x in once.items()}
    o, S = run(inputs, objective=objective)
    k, v = once["k"][0, 0, 0], once["v"][0, 0, 0]
    assert o.isfinite().all()
    assert (S.norm(dim=-1) - 1).abs().max() < 1e-5
    reached = {"decode": S[0, 0].T @ k - v, "encode": S[0, 0] @ v - k, "similarity": S[0, 0] - k.sign()[:, None] * v}
    assert reached[objective].abs().max() < 1e-3


@objectives
@pytest.mark.parametrize("time", [2048, pytest.param(65_536, marks=pytest.mark.slow)])
def test_long_sequence_stays_finite(objective: str, time: int) -> None:
    inputs = draw(time, batch=1, heads=1, value=4, dtype=torch.float32)
    o, S = run(inputs, objective=objective)
    assert o.isfinite().all()
    assert (S.norm(dim=-1) - 1).abs().max() < 1e-5


@objectives
def test_keys_and_values_along_one_direction(objective: str) -> None:
    inputs = draw(300)
    for name in ("k", "v"):
        inputs[name] = F.normalize(0.01 * inputs[name] + F.one_hot(torch.tensor(1), inputs[name].shape[-1]), dim=-1)
    wanted = run(inputs, objective=objective, backend="reference")
    got = run({name: x.float() for name, x in inputs.items()}, objective=objective)
    for g, w in zip(got, wanted):
        assert (g - w).norm() <= 1e-3 * w.norm()


@pytest.mark.parametrize("objective", ["encode", "similarity"])
def test_long_steps_along_a_slot(objective: str) -> None:
    """Steps of several times what would carry a slot to h: there coefficients grow without bound and must not be used. With
    h exactly along slots of the identity, nothing is across them and nothing may move."""
    inputs = draw(60, key=6, dtype=torch.float32)
    inputs["v"] = 30 * F.one_hot(torch.arange(60) % 6, 6).float()[None, :, None].expand(2, 60, 2, 6)
    inputs["k"] = inputs["v"] / 30
    o, S = run(inputs, objective=objective)
    torch.testing.assert_close(S, torch.eye(6).expand(2, 2, 6, 6), rtol=0, atol=1e-6)

    near = {name: x.double() for name, x in inputs.items()}
    near["v"] = near["v"] / 10 + 0.3 * draw(60)["v"]
    S = torch.eye(6, dtype=torch.float64).expand(2, 2, 6, 6)
    wanted = gradients(near, S, objective=objective, backend="reference")
    got = gradients(near, S, objective=objective)
    for g, w in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]]):
        assert (g - w).norm() <= 1e-8 * w.norm()


def test_coefficients_say_where_they_do_not_hold() -> None:
    h = torch.eye(4)[0].expand(2, 8, 4) * torch.tensor([1.0, 10.0])[:, None, None]
    q, decay, slots, length = (
        torch.randn(2, 8, 4),
        torch.ones(2, 8, 1),
        torch.eye(4).repeat(2, 1, 1),
        torch.ones(2, 1, 4),
    )
    *_, hold = Coefficients.apply(q, h, torch.ones(2, 8, 4), None, decay, slots, length, Workspace())
    assert hold.tolist() == [True, False]


def test_bad_arguments() -> None:
    inputs = draw(3)
    with pytest.raises(ValueError, match="objective must be one of decode, encode, similarity, got 'ridge'"):
        lattice(**inputs, objective="ridge")
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match="decay must be between 0 and 1"):
            lattice(**inputs, decay=torch.full_like(inputs["gamma"], bad))
    with pytest.raises(ValueError, match=r"decay must have shape \[2, 3, 2\]"):
        lattice(**inputs, decay=inputs["gamma"][..., None])
    with pytest.raises(TypeError, match="normalize must be True or False"):
        lattice(**inputs, normalize=1)
    with pytest.raises(ValueError, match="l1 must be a finite number, at least 0"):
        lattice(**inputs, l1=-1.0)
    wide = draw(3, key=6, value=4)
    with pytest.raises(ValueError, match=r"initial_state must be given .* pass \[2, 2, 6, 4\]"):
        lattice(**wide)
    assert lattice(**wide, initial_state=draw_state(wide))[0].isfinite().all()


def test_auto_takes_the_chunkwise_form_where_the_kernels_lack_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "takes_kernels", lambda backend, x: True)  # as on a GPU
    chosen = [call.choose_backend(spec_of(lattice), "auto", torch.ones(1), {"l1": l1}) for l1 in (0.0, 0.1)]
    assert chosen == ["triton", "torch"]
