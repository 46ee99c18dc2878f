"""Losses of a student that learns from a teacher: the divergence of their next-token distributions, without the logits of all
tokens in memory at once, and the difference of their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_choice, check_positive, check_size, check_tensor, shape_of
from ..kinds import checked
from ..layers.norms import at_least_float32
from ..models.loss import chunk_size, sum_gradients
from ..ops.authoring import product_dtype

__all__ = ["HIDDEN_LOSSES", "hidden_loss", "summed_kl"]

HIDDEN_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {  # of each token
    "mse": lambda student, teacher: (student - teacher).square().mean(-1),
    "cosine": lambda student, teacher: 1 - F.cosine_similarity(student, teacher, dim=-1),
}


@checked
def summed_kl(
    student_hidden_TD: Tensor,
    student_weight_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_weight_VE: Tensor,
    mask_T: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    student_bias_V: Tensor | None = None,
    teacher_bias_V: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    r"""$$\tau^2 \sum_t \mathrm{KL}(p_t \,\|\, q_t), \qquad p_t = \mathrm{softmax}(z^\mathrm{teacher}_t / \tau), \quad
    q_t = \mathrm{softmax}(z^\mathrm{student}_t / \tau), \quad z = c \tanh((h W^\top + b) / c)$$ in nats, over the whole
    vocabulary and the tokens of the mask.

    The factor $\tau^2$ keeps the size of the gradients at every temperature (Hinton et al. 2015, section 2). Logits exist for
    one chunk of tokens at a time; backward computes them again from the log-sum-exps that forward keeps. Gradients of the
    student are exact; the teacher gets none. The products of each side are in the dtype of its hidden states, or autocast's;
    softcaps, softmax, sums and the gradients of weight and bias are in float32, or float64 where the student's products are.

    Args:
        student_hidden_TD, student_weight_VD: final hidden states of T tokens (0 or more), and the weight of the output layer.
        teacher_hidden_TE, teacher_weight_VE: those of the teacher; its width E may be another one.
        mask_T: bool or 0 and 1, the tokens that count; None for all.
        temperature: $\tau$.
        chunk: tokens at a time; when None as many as have 2^25 logits of both sides together on a CPU and 2^27 elsewhere, at
            least 256.
        student_bias_V, teacher_bias_V: biases b of the output layers; None for none.
        student_softcap, teacher_softcap: c, the bound of the logits (Gemma 2); None for none, which is z = h W^T + b.

    Returns:
        [], float32 or float64.

    Raises:
        ValueError: vocabularies of different sizes, shapes that do not fit, or a number that is not positive.
    """
    for name, x in (
        ("student_hidden_TD", student_hidden_TD),
        ("student_weight_VD", student_weight_VD),
        ("teacher_hidden_TE", teacher_hidden_TE),
        ("teacher_weight_VE", teacher_weight_VE),
    ):
        check_tensor(name, x, student_hidden_TD)
        _check_shape(name, x, "a matrix", x.ndim == 2)
    tokens, vocabulary = len(student_hidden_TD), len(student_weight_VD)
    if len(teacher_weight_VE) != vocabulary:
        raise ValueError(
            f"teacher_weight_VE must have as many tokens of a vocabulary as student_weight_VD, {vocabulary:,}, got "
            f"{len(teacher_weight_VE):,}; take a teacher and a student with one tokenizer, and resize_token_embeddings of the "
            "smaller model where one of them has only filled up its vocabulary"
        )
    shapes = (
        ("student_weight_VD", student_weight_VD, (vocabulary, student_hidden_TD.shape[1])),
        ("teacher_hidden_TE", teacher_hidden_TE, (tokens, teacher_weight_VE.shape[1])),
        ("student_bias_V", student_bias_V, (vocabulary,)),
        ("teacher_bias_V", teacher_bias_V, (vocabulary,)),
        ("mask_T", mask_T, (tokens,)),
    )
    for name, given, shape in shapes:
        if given is not None:
            others = " and ".join(one for one in ("student_hidden_TD", "student_weight_VD") if one != name)
            _check_shape(name, given, f"{list(shape)} to fit {others}", given.shape == shape)
    temperature = check_positive("temperature", temperature)
    sides = {}
    for name, hidden, softcap in (
        ("student", student_hidden_TD, student_softcap),
        ("teacher", teacher_hidden_TE, teacher_softcap),
    ):
        bound = None if softcap is None else check_positive(f"{name}_softcap", softcap)
        sides[name] = _Side(product_dtype(hidden), bound, temperature)
    settings = _Settings(
        **sides,
        chunk=chunk_size(student_hidden_TD.device, 2 * vocabulary) if chunk is None else check_size("chunk", chunk),
    )
    student = (student_hidden_TD, student_weight_VD, student_bias_V)
    return _SummedKL.apply(*student, teacher_hidden_TE, teacher_weight_VE, teacher_bias_V, mask_T, settings)


def _check_shape(name: str, x: Tensor, wanted: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got shape {shape_of(x)}; flatten batch and time into tokens")


@dataclass(frozen=True)
class _Side:
    """How the student or the teacher turns hidden states into logits: dtype of the product, softcap, temperature."""

    dtype: torch.dtype
    softcap: float | None
    temperature: float

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """New logits [C, V] over the temperature, in float32 or better. The weight is in the side's dtype."""
        bias = None if bias_V is None else bias_V.to(self.dtype)
        logits_CV = at_least_float32(F.linear(hidden_CD.to(self.dtype), weight_VD, bias))
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV if self.temperature == 1 else logits_CV.div_(self.temperature)

    def slopes(self, logits_CV: Tensor) -> Tensor | None:
        """The derivative 1 - (z / c)^2 of the softcap, from what `logits` returns; None without a softcap."""
        if self.softcap is None:
            return None
        return (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1)


class _Chunk(NamedTuple):
    """Some tokens: the student's hidden states, logits of both sides over the temperature, and which tokens count."""

    hidden_CD: Tensor
    student_CV: Tensor
    teacher_CV: Tensor
    mask_C: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Settings:
    student: _Side
    teacher: _Side
    chunk: int

    def chunks(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        teacher_hidden_TE: Tensor,
        teacher_weight_VE: Tensor,
        teacher_bias_V: Tensor | None,
        mask_T: Tensor | None,
    ) -> Iterator[_Chunk]:
        """One after another; without tokens an empty one."""
        weight, teacher_weight = weight_VD.to(self.student.dtype), teacher_weight_VE.to(self.teacher.dtype)
        for start in range(0, max(len(hidden_TD), 1), self.chunk):
            part = slice(start, start + self.chunk)
            student = self.student.logits(hidden_TD[part], weight, bias_V)
            teacher = self.teacher.logits(teacher_hidden_TE[part], teacher_weight, teacher_bias_V)
            yield _Chunk(
                hidden_TD[part], student, teacher.to(student.dtype), None if mask_T is None else mask_T[part].bool()
            )


class _SummedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, settings = inputs
        student_sums, teacher_sums, totals = [], [], []
        for _, student, teacher, mask in settings.chunks(*tensors):
            student_sums.append(student.logsumexp(1))
            teacher_sums.append(teacher.logsumexp(1))
            p = (teacher - teacher_sums[-1][:, None]).exp_()
            kl = p.mul_(teacher.sub_(student)).sum(1) + student_sums[-1] - teacher_sums[-1]
            totals.append((kl if mask is None else kl.masked_fill(~mask, 0)).sum())
        ctx.settings = settings
        ctx.save_for_backward(*tensors, torch.cat(student_sums), torch.cat(teacher_sums))
        return torch.stack(totals).sum() * settings.student.temperature**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, student_sum_T, teacher_sum_T = ctx.saved_tensors
        settings: _Settings = ctx.settings
        side = settings.student

        def errors() -> Iterator[tuple[Tensor, Tensor]]:
            sums = (x[:, None].split(settings.chunk) for x in (student_sum_T, teacher_sum_T))
            for chunk, student_sum, teacher_sum in zip(settings.chunks(*tensors), *sums, strict=True):
                slopes = side.slopes(chunk.student_CV)
                error = chunk.student_CV.sub_(student_sum).exp_().sub_(chunk.teacher_CV.sub_(teacher_sum).exp_())
                error.mul_(gradient * side.temperature)
                if slopes is not None:
                    error.mul_(slopes)
                if chunk.mask_C is not None:
                    error.masked_fill_(~chunk.mask_C[:, None], 0)
                yield chunk.hidden_CD.to(side.dtype), error.to(side.dtype)

        hidden_TD, weight_VD, bias_V = tensors[:3]
        gradients = sum_gradients(
            errors(), hidden_TD, weight_VD, bias_V, weight=weight_VD.to(side.dtype), needed=ctx.needs_input_grad
        )
        return *gradients, None, None, None, None, None


@checked
def hidden_loss(student_TD: Tensor, teacher_TD: Tensor, kind: str = "mse", mask_T: Tensor | None = None) -> Tensor:
    r"""How far hidden states are from a teacher's, summed over the tokens: of each token
    $rac{1}{D} \|s_t - u_t\|^2$ ("mse") or $1 - rac{s_t \cdot u_t}{\|s_t\| \|u_t\|}$ ("cosine").

    Args:
        student_TD, teacher_TD: s and u, [..., D], of one shape. No gradient goes to the teacher.
        kind: "mse" or "cosine".
        mask_T: [...], bool or 0 and 1, the tokens that count; None for all.

    Returns:
        [], in float32, or float64 where the student is.

    Raises:
        ValueError: shapes that do not fit, or another kind.
    """
    check_tensor("teacher_TD", teacher_TD, check_tensor("student_TD", student_TD))
    check_choice("kind", kind, HIDDEN_LOSSES)
    if student_TD.ndim == 0 or teacher_TD.shape != student_TD.shape:
        raise ValueError(
            f"teacher_TD must have the shape of student_TD, {shape_of(student_TD)}, got {shape_of(teacher_TD)}; compare hidden "
            "states of one width"
        )
    if mask_T is not None and mask_T.shape != student_TD.shape[:-1]:
        raise ValueError(f"mask_T must be {list(student_TD.shape[:-1])}, one entry per token, got {shape_of(mask_T)}")
    student = at_least_float32(student_TD)
    loss_T = HIDDEN_LOSSES[kind](student, teacher_TD.detach().to(student.dtype))
    return (loss_T if mask_T is None else loss_T.masked_fill(~mask_T.bool(), 0)).sum()
