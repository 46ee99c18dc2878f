"""The losses of distillation: the ordinary divergence, value and gradients, without all the logits; hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.distillation import hidden_loss, summed_kl

from ..models.live_bytes import LargestTensor

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 23, 11, 7, 5
NAMES = ("student_hidden_TD", "student_weight_VD", "student_bias_V")
TEACHER = ("teacher_hidden_TE", "teacher_weight_VE", "teacher_bias_V")


def draw(dtype: torch.dtype = torch.float64, tokens: int = TOKENS, bias: bool = True) -> dict[str, Tensor]:
    """The tensors of `summed_kl` with a mask that leaves some tokens out; the student's take gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    sides = zip((NAMES, TEACHER), (WIDTH, TEACHER_WIDTH), strict=True)
    drawn = {}
    for names, width in sides:
        shapes = ((tokens, width), (VOCABULARY, width), (VOCABULARY,))
        drawn |= {name: normal(*shape) for name, shape in zip(names, shapes, strict=True) if bias or len(shape) > 1}
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[::4] = False
    return {name: x.requires_grad_(name in NAMES) for name, x in drawn.items()} | {"mask_T": mask}


def ordinary(
    drawn: dict[str, Tensor], temperature: float = 1.0, softcaps: tuple[float | None, float | None] = (None, None)
) -> Tensor:
    """The divergence as torch computes it from all logits."""
    logs = []
    for names, cap in zip((NAMES, TEACHER), softcaps, strict=True):
        hidden, weight, bias = (drawn.get(name) for name in names)
        z = F.linear(hidden, weight, bias)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z = z if cap is None else cap * torch.tanh(z / cap)
        logs.append((z / temperature).log_softmax(-1))
    kl = F.kl_div(logs[0], logs[1], log_target=True, reduction="none").sum(-1)
    return temperature**2 * kl[drawn["mask_T"]].sum()


def value_and_gradients(loss: Tensor, drawn: dict[str, Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [drawn[name] for name in NAMES if name in drawn])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000, None])
@pytest.mark.parametrize(("temperature", "softcaps"), [(1.0, (None, None)), (2.5, (3.0, None)), (0.5, (None, 2.0))])
def test_value_and_gradients_are_exact(bias, chunk, temperature, softcaps):
    drawn = draw(bias=bias)
    caps = dict(zip(("student_softcap", "teacher_softcap"), softcaps, strict=True))
    chunked = summed_kl(**drawn, temperature=temperature, chunk=chunk, **caps)
    wanted = value_and_gradients(3 * ordinary(drawn, temperature, softcaps), drawn)
    for got, exact in zip(value_and_gradients(3 * chunked, drawn), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    drawn = draw(tokens=6)
    leaves = [drawn.pop(name) for name in NAMES]

    def loss(*student: Tensor) -> Tensor:
        given = {**drawn, **dict(zip(NAMES, student, strict=True))}
        return summed_kl(**given, temperature=1.7, chunk=4, student_softcap=2.0, teacher_softcap=4.0)

    assert torch.autograd.gradcheck(loss, leaves)


def test_the_same_model_has_no_divergence():
    drawn = draw(torch.float32)
    student = [drawn[name].detach() for name in NAMES]
    same = dict(zip((*NAMES, *TEACHER), student * 2, strict=True))
    assert summed_kl(**same, chunk=5) == 0


def test_a_teacher_gets_no_gradient():
    drawn = {name: x if name == "mask_T" else x.detach().requires_grad_() for name, x in draw().items()}
    summed_kl(**drawn, chunk=5).backward()
    assert all(drawn[name].grad is not None for name in NAMES) and all(drawn[name].grad is None for name in TEACHER)


def test_frozen_parts_get_no_gradient():
    drawn = draw()
    drawn["student_weight_VD"].requires_grad_(False)
    drawn["student_bias_V"].requires_grad_(False)
    summed_kl(**drawn, chunk=5).backward()
    assert drawn["student_hidden_TD"].grad is not None
    assert drawn["student_weight_VD"].grad is None and drawn["student_bias_V"].grad is None
    drawn = draw()
    drawn["student_hidden_TD"].requires_grad_(False)
    summed_kl(**drawn, chunk=5).backward()
    assert drawn["student_hidden_TD"].grad is None and drawn["student_weight_VD"].grad is not None


def test_large_logits_stay_finite():
    drawn = {name: x if name == "mask_T" else (100 * x).detach().requires_grad_() for name, x in draw().items()}
    loss = summed_kl(**drawn, chunk=5)
    assert all(x.isfinite().all() for x in value_and_gradients(loss, drawn))


@pytest.mark.parametrize("teacher", [torch.bfloat16, torch.float32])
def test_bfloat16_sums_in_float32(teacher):
    """Many chunks: a weight gradient summed in bfloat16 would lose the small parts."""
    drawn = draw(torch.bfloat16, tokens=4000)
    drawn |= {name: drawn[name].to(teacher) for name in TEACHER}
    exact = {
        name: x if name == "mask_T" else x.detach().double().requires_grad_(x.requires_grad)
        for name, x in drawn.items()
    }
    wanted = value_and_gradients(ordinary(exact), exact)
    results = value_and_gradients(summed_kl(**drawn, chunk=8), drawn)
    assert [x.dtype for x in results] == [torch.float32, *[torch.bfloat16] * 3]
    for got, right, bound in zip(results, wanted, (1e-3, 6e-3, 4e-3, 4e-3), strict=True):
        assert (got.double() - right).norm() <= bound * right.norm()


def test_autocast_computes_like_the_ordinary_layers():
    drawn = draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        chunked, whole = summed_kl(**drawn, chunk=5, temperature=2.0), ordinary(drawn, 2.0)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)
    wanted = value_and_gradients(whole, drawn)
    for got, right in zip(value_and_gradients(chunked, drawn), wanted, strict=True):
        assert got.dtype == torch.float32
        assert (got - right).norm() <= 2e-2 * right.norm()


def test_without_tokens_and_without_any_that_count():
    empty = draw(tokens=0)
    drawn = draw()
    drawn["mask_T"] = torch.zeros(TOKENS, dtype=torch.int64)
    for given in (empty, drawn):
        value, *gradients = value_and_gradients(summed_kl(**given), given)
        assert value == 0 and value.dtype == torch.float64 and not any(x.any() for x in gradients)
        assert [x.shape for x in gradients] == [given[name].shape for name in NAMES]


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr("fastweights.models.loss.SMALLEST_CHUNK", 4)
    monkeypatch.setattr("fastweights.models.loss.CHUNK_NUMBERS", {"cpu": 2 * 4 * 1600})
    generator = torch.Generator().manual_seed(0)
    student, weight, teacher, taught = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((128, 8), (1600, 8), (128, 16), (1600, 16))
    )
    with LargestTensor() as watch:
        summed_kl(student, weight, teacher, taught).backward()
    assert watch.numel == 1600 * 16  # a weight; a chunk of logits is 4 * 1600, those of all tokens 128 * 1600
    monkeypatch.setattr("fastweights.models.loss.CHUNK_NUMBERS", {"cpu": 2 * 32 * 1600})
    with LargestTensor() as watch:
        summed_kl(student, weight, teacher, taught).backward()
    assert watch.numel == 32 * 1600  # no tensor holds both sides' logits of a chunk


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"teacher_weight_VE": torch.ones(12, TEACHER_WIDTH)}, "resize_token_embeddings"),
    ({"teacher_hidden_TE": torch.ones(TOKENS + 1, TEACHER_WIDTH)}, r"teacher_hidden_TE must be \[23, 5\]"),
    ({"student_weight_VD": torch.ones(VOCABULARY, 3)}, r"student_weight_VD must be \[11, 7\]"),
    ({"student_hidden_TD": torch.ones(2, 3, WIDTH)}, "student_hidden_TD must be a matrix.*flatten"),
    ({"student_bias_V": torch.ones(3)}, r"student_bias_V must be \[11\]"),
    ({"mask_T": torch.ones(3)}, r"mask_T must be \[23\]"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"teacher_softcap": -1.0}, "teacher_softcap must be positive"),
    ({"chunk": 0}, "chunk must be a positive whole number"),
    ({"teacher_hidden_TE": torch.ones(TOKENS, TEACHER_WIDTH, dtype=torch.int64)}, "teacher_hidden_TE must be float16"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        summed_kl(**draw(torch.float32) | change)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_hidden_states(kind):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 9, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.rand(2, 9, generator=generator) < 0.5
    student.requires_grad_(), teacher.requires_grad_()
    loss = hidden_loss(student, teacher, kind, mask)
    if kind == "mse":
        wanted = sum(F.mse_loss(s, t) for s, t in zip(student[mask], teacher[mask], strict=True))
    else:
        lengths = student.norm(dim=-1) * teacher.norm(dim=-1)
        wanted = (1 - (student * teacher).sum(-1) / lengths)[mask].sum()
    torch.testing.assert_close(loss, wanted)
    (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, student)[0])
    assert not gradient[~mask].any()
    loss.backward()
    assert teacher.grad is None
    assert torch.autograd.gradcheck(lambda x: hidden_loss(x, teacher, kind), student)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_hidden_states_of_16_bits_are_compared_in_float32(kind):
    x = torch.linspace(-2, 2, 4096).view(4, 1024).bfloat16()
    loss = hidden_loss(x, 1.1 * x, kind)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), hidden_loss(x.double(), (1.1 * x).double(), kind), rtol=1e-4, atol=1e-6)


def test_hidden_states_that_do_not_fit_are_refused():
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match="shape of student_TD"):
        hidden_loss(x, torch.ones(4, 2))
    with pytest.raises(ValueError, match="one entry per token"):
        hidden_loss(x, x, "mse", torch.ones(3))
    with pytest.raises(ValueError, match="kind must be"):
        hidden_loss(x, x, "mae")
