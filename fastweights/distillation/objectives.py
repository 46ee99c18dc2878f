"""What a student learns: the loss of a step, and what is measured on held-out text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..evaluation.causal_models import OutputHead, final_hidden, output_head
from ..models.hybrid.model import positions_of
from ..models.loss import IGNORED, OutputLayer, chunk_size, next_labels, summed_cross_entropy
from ..models.rows import Rows
from .losses import hidden_loss, summed_kl
from .run import DistillRun
from .teacher import HIDDEN, INPUTS, OUTPUTS, Teacher

__all__ = ["Objective"]


class Objective:
    """Takes the place of the student's forward in a training. DDP and FSDP2 add up gradients and gather parameters around the
    student's call, so that what is computed of parameters must be within it.

    Args:
        run: the settings.
        student: a hybrid, whose output layer becomes an `OutputLayer`.
        teacher: None where the objective has none.
    """

    def __init__(self, run: DistillRun, student: Any, teacher: Teacher | None) -> None:
        student.set_output_embeddings(OutputLayer.from_linear(student.get_output_embeddings()))
        self._run, self._student, self._forward = run, student, student.forward
        self._teacher = None if teacher is None else output_head(teacher.model)

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **lesson: Tensor,
    ) -> dict[str, Any]:
        """The loss of a packed batch, in training mode. In evaluation mode what is measured, in the order of `measured`.

        All are means over the tokens that predict one: sums over those of the batch, divided by their number, or by
        num_items_in_batch.

        Args:
            input_ids, labels: int64 [1, N]. Labels are the ids, -100 where no token predicts.
            cu_seqlens: int [S+1], where documents begin and end.
            lesson: what `Teacher.read` gives.
        """
        mask_1N = next_labels(labels) != IGNORED
        count = mask_1N.sum() if num_items_in_batch is None else num_items_in_batch
        batch = {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens, "mask": mask_1N, **lesson}
        attends = self._run.objective == "attention"
        if self._student.training:
            loss = self._attention(batch) if attends else self._output(self._hidden(batch), batch, self._weights())
            return {"loss": loss / count}
        text, kl = (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)
        hidden_1ND = self._hidden(batch)
        found = [self._output(hidden_1ND, batch, text)]
        if self._teacher is not None:
            found += [
                self._attention(batch) if attends else self._output(hidden_1ND, batch, self._weights()),
                self._output(hidden_1ND, batch, kl, temperature=1.0),
            ]
        return {"measured": [x / count for x in found]}

    @property
    def measured(self) -> tuple[str, ...]:
        """transformers' names of what evaluation gives: the next-token loss, the loss that is learnt by, the divergence from
        the teacher at temperature 1."""
        return ("eval_loss",) if self._teacher is None else ("eval_loss", "eval_objective", "eval_kl")

    def _weights(self) -> tuple[float, float, float]:
        run = self._run
        return (run.kl_weight, run.hidden_weight, run.text_weight) if run.needs_teacher else (0.0, 0.0, 1.0)

    def _attention(self, batch: dict[str, Tensor]) -> Tensor:
        """Summed over tokens and converted layers, how far a memory's answers are from those of the attention in its place."""
        edges, tokens = batch["cu_seqlens"], batch["input_ids"].shape[1]
        rows, places = Rows(1, tokens, cu_seqlens=edges), positions_of(edges, tokens, edges.device)
        losses = []
        for number, (layer, attention) in enumerate(self._student.memory_layers().items()):
            x_1ND = batch[INPUTS][number].to(self._student.dtype)
            rotation = _rotation(self._student, x_1ND, places, layer)
            answer_1ND, _ = attention(x_1ND, position_embeddings=rotation, attention_mask=None, memory_rows=rows)
            losses.append(hidden_loss(answer_1ND, batch[OUTPUTS][number], self._run.attention_loss, batch["mask"]))
        return torch.stack(losses).sum()

    def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """The student's final hidden states [1, N, D]."""
        given: dict[str, Any] = {"cu_seqlens": batch["cu_seqlens"], "max_length_q": self._run.length}
        return final_hidden(self._student, batch["input_ids"], forward=self._forward, use_cache=False, **given)

    def _output(
        self, hidden_1ND: Tensor, batch: dict[str, Tensor], weights: Sequence[float], temperature: float | None = None
    ) -> Tensor:
        """The weighted sum over tokens of divergence, difference of hidden states and next-token loss."""
        measure = partial(self._measure, hidden_1ND, batch, weights, temperature or self._run.temperature)
        return self._student.lm_head(hidden_1ND, measure=measure)

    def _measure(
        self,
        hidden_1ND: Tensor,
        batch: dict[str, Tensor],
        weights: Sequence[float],
        temperature: float,
        weight_VD: Tensor,
        bias_V: Tensor | None,
    ) -> Tensor:
        (kl, hidden, text), head = weights, output_head(self._student)._replace(weight_VD=weight_VD, bias_V=bias_V)
        parts = []
        if kl:
            assert self._teacher is not None
            divergence = summed_kl(
                hidden_1ND[0],
                head.weight_VD,
                batch[HIDDEN][0],
                self._teacher.weight_VD,
                batch["mask"][0],
                temperature,
                student_bias_V=head.bias_V,
                teacher_bias_V=self._teacher.bias_V,
                student_softcap=head.softcap,
                teacher_softcap=self._teacher.softcap,
            )
            parts.append(kl * divergence)
        if hidden:
            parts.append(hidden * hidden_loss(hidden_1ND, batch[HIDDEN], self._run.hidden_loss, batch["mask"]))
        if text:
            parts.append(text * _text_loss(hidden_1ND[0], head, next_labels(batch["labels"])[0]))
        return torch.stack(parts).sum()


def _text_loss(hidden_ND: Tensor, head: OutputHead, target_N: Tensor) -> Tensor:
    """The summed next-token loss, without the logits of all tokens at once."""
    if head.bias_V is None and head.softcap is None:
        return summed_cross_entropy(hidden_ND, head.weight_VD, target_N)

    def chunk_loss(hidden: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, head.weight_VD, head.bias_V).float()
        if head.softcap is not None:
            logits = head.softcap * (logits / head.softcap).tanh()
        return F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")

    size = chunk_size(hidden_ND.device, len(head.weight_VD))
    chunks = zip(hidden_ND.split(size), target_N.split(size), strict=True)
    return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def _rotation(student: Any, x_1ND: Tensor, places_1N: Tensor, layer: int) -> Any:
    """Cosines and sines of the rotary positions, as the layer gets them. Gemma 3 has others for each kind of layer."""
    rotary: nn.Module = student.model.rotary_emb
    per_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    return rotary(x_1ND, places_1N, *([student.config.layer_types[layer]] if per_kind else []))
