"""Output-normalised test-time training: what a step is, and what holds where an answer has no direction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, output_normalized_ttt

backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def draw(time: int, *, batch: int = 2, heads: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """4 key channels, 6 value channels."""
    generator = torch.Generator().manual_seed(time)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, time, heads, *shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(4).to(dtype),
        "k": F.normalize(normal(4), dim=-1).to(dtype),
        "v": F.normalize(normal(6), dim=-1).to(dtype),
        "gamma": normal().sigmoid().to(dtype),
    }


def draw_state(inputs: dict[str, Tensor]) -> Tensor:
    (batch, _, heads, value), key = inputs["v"].shape, inputs["k"].shape[3]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, heads, key, value, generator=generator, dtype=torch.float64).to(inputs["v"].dtype)


def run(inputs: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    o, S = output_normalized_ttt(**inputs, output_final_state=True, **options)
    assert S is not None
    return o, S


@backends
def test_each_step_descends_the_gradient(backend: str) -> None:
    """Of |z/|z| - v|^2 / 2 with z = S^T k, by automatic differentiation."""
    inputs = draw(70)
    start = S = draw_state(inputs)
    read = []
    for t in range(70):
        S = S.detach().requires_grad_()
        z = (S.mT @ inputs["k"][:, t, :, :, None])[..., 0]
        (step,) = torch.autograd.grad((F.normalize(z, dim=-1) - inputs["v"][:, t]).square().sum() / 2, S)
        S = (S - inputs["gamma"][:, t, :, None, None] * step).detach()
        read.append((S.mT @ inputs["q"][:, t, :, :, None])[..., 0])
    o, final = run(inputs, initial_state=start, backend=backend)
    torch.testing.assert_close(o, torch.stack(read, 1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(final, S, rtol=1e-10, atol=1e-10)


@backends
def test_answers_change_across_themselves(backend: str) -> None:
    """The answer to the key just written turns, and so grows by Pythagoras."""
    inputs = {name: x[:, :1] for name, x in draw(3).items()}
    S, k = draw_state(inputs), inputs["k"][:, 0, :, :, None]
    _, after = run(inputs, initial_state=S, backend=backend)
    before, change = S.mT @ k, (after - S).mT @ k
    assert change.norm() > 0.1
    assert (before * change).sum(-2).abs().max() < 1e-13
    torch.testing.assert_close((after.mT @ k).square().sum(-2), before.square().sum(-2) + change.square().sum(-2))


@backends
def test_an_answer_without_direction_is_written_by_the_delta_rule(backend: str) -> None:
    inputs = {name: x[:, :1] for name, x in draw(3).items()}
    for S in (torch.zeros(2, 2, 4, 6, dtype=torch.float64), 1e-8 * draw_state(inputs)):
        _, got = run(inputs, initial_state=S, backend=backend)
        _, wanted = delta_rule(
            *(inputs[x] for x in ("q", "k", "v", "gamma")), scale=1.0, initial_state=S, output_final_state=True
        )
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)


@backends
def test_orthogonal_keys_from_zeros_are_all_stored(backend: str) -> None:
    inputs = draw(4)
    inputs["q"] = inputs["k"] = torch.eye(4, dtype=torch.float64)[None, :, None].expand(2, 4, 2, 4)
    o, S = run(inputs, backend=backend)
    torch.testing.assert_close(o, inputs["gamma"][..., None] * inputs["v"], rtol=1e-14, atol=0)
    torch.testing.assert_close(S, o.transpose(1, 2), rtol=0, atol=0)


@backends
def test_gradients_from_zeros_and_through_zero_keys(backend: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in draw(40).items()}
    keys = inputs["k"] * (torch.arange(40) % 3 > 0)[:, None, None]
    o, S = run({**inputs, "k": keys}, backend=backend)
    found = torch.autograd.grad(o.sum() + S.sum(), list(inputs.values()))
    assert all(g.isfinite().all() for g in (o, S, *found))
    silent = {**inputs, "k": torch.zeros_like(keys)}
    start = draw_state(inputs)
    torch.testing.assert_close(run(silent, initial_state=start, backend=backend)[1], start, rtol=0, atol=0)


def test_one_token_many_times() -> None:
    """The answer turns until it points along the value."""
    once = draw(1, batch=1, heads=1, dtype=torch.float32)
    inputs = {name: x.expand(-1, 10_000, *[-1] * (x.ndim - 2)) for name, x in once.items()}
    _, S = run(inputs, initial_state=draw_state(once))
    answer = S[0, 0].T @ once["k"][0, 0, 0]
    assert F.cosine_similarity(answer, once["v"][0, 0, 0], dim=0) > 1 - 1e-5


def test_keys_along_one_direction() -> None:
    inputs = draw(300)
    inputs["k"] = F.normalize(0.01 * inputs["k"] + F.one_hot(torch.tensor(1), 4), dim=-1)
    o, S = run(inputs, backend="reference")
    got = run({name: x.float() for name, x in inputs.items()})
    for g, w in zip(got, (o, S)):
        assert (g - w).norm() <= 1e-3 * w.norm()
