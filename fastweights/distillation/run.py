"""The configuration of a distillation: that of a training, and how its student learns from its teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..checks import check_choice, check_number, check_path, check_positive, check_text, check_texts, describe_value
from ..evaluation.ruler import NEEDLE_TASKS
from ..models.loading import empty_model, find_saved_model, load_config
from ..training.language import LanguageRun
from ..training.language.agreement import sample_model
from .losses import HIDDEN_LOSSES
from .selection import read_selection
from .teacher import quantize_linears, teacher_blocks

__all__ = ["OBJECTIVES", "TEACHER_DTYPES", "DistillRun"]

OBJECTIVES = ("attention", "logits", "text")
TEACHER_DTYPES = ("bfloat16", "float32", "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRun(LanguageRun):
    """One distillation: a hybrid that `fastweights convert` made of a pretrained model, its teacher, learns what that computes.

    It is a training as `LanguageRun` describes it, with another loss. A recipe of several steps has them as `stages`, each with
    an objective, rows, rates and `train` of its own.

    Attributes:
        model: {"path": folder} of the student, or of a training to continue from.
        teacher: folder of the teacher; "" for the one that the student's config.json names, where that is a folder.
        teacher_dtype: "bfloat16", "float32", or "int8": the weights of linear layers in 8 bits, one scale per output channel, all
            else in bfloat16, the output layer and the experts of a Qwen3-MoE too. A teacher takes no part in gradients and
            checkpoints. With fsdp the processes share it: each keeps a part of every block. Without, every process has one;
            processes on the CPUs of one host share its memory where its files have this dtype: they map the files.
        objective: what the student learns.
            "attention": the memory in every converted layer learns what the attention in its place gave, on the teacher's hidden
            states. All layers learn from one forward of the teacher. The rest of the student is not computed, so that
            gradient_checkpointing, which is by blocks, does nothing.
            "logits": the student learns the teacher's distribution over the next token, and its final hidden states.
            "text": the next token, without a teacher, as for long contexts at the end.
        attention_loss: "mse" or "cosine" (1 - cosine), the mean over tokens, summed over layers; of "attention".
        hidden_loss: "mse" or "cosine", of the final hidden states before the output layer; of "logits".
        kl_weight, hidden_weight, text_weight: the loss of "logits" is kl_weight KL(teacher || student) + hidden_weight times the
            hidden_loss + text_weight times the next-token loss, each the mean over the tokens that predict one.
        temperature: both sides' logits are divided by it in the training loss, and the divergence is multiplied by its square.
        needles: needle tasks that teacher and student are compared by at the end, at each of context_lengths, beside held-out
            divergence and perplexity; () for none.
        train: as in `LanguageRun`. () is the attention modules that have a memory for "attention", and all parameters for
            others, without those of an output layer of its own where hidden_weight alone is above 0.
        cache_teacher: folder where the teacher's final hidden states are kept per row of text, in its dtype, and read again
            by later epochs, stages and runs with the same teacher and rows; False computes them each time. A token takes twice
            the teacher's width in bytes, with float32 four times. "attention" needs what every layer computed, and keeps
            nothing.
        selection: the budget with which `fastweights convert --keep auto:N` ranked the layers, fields of `SelectionSettings`; {}
            where it did not. `convert --run-file` takes it from here; the distillation itself does not depend on it.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    COMMAND: ClassVar[str] = "distill"
    output: str = "runs/distill"
    teacher: str = ""
    teacher_dtype: str = "bfloat16"
    objective: str = "logits"
    attention_loss: str = "mse"
    hidden_loss: str = "mse"
    kl_weight: float = 1.0
    hidden_weight: float = 0.0
    text_weight: float = 0.0
    temperature: float = 1.0
    needles: tuple[str, ...] = ("s-niah-1", "s-niah-2")
    cache_teacher: str | bool = False
    selection: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "path" not in self.model:
            raise ValueError(
                "model must have a path, the folder of a student that `fastweights convert` has made of its teacher, got "
                f"{describe_value(dict(self.model))}; set path in [model]"
            )
        if self.context_parallel > 1:
            raise ValueError(
                f"context_parallel must be 1 in a distillation, whose attention reads whole rows, got {self.context_parallel}"
            )
        if self.compile is True:
            raise ValueError('compile must be "blocks", False or None in a distillation, got True; choose "blocks"')
        check_text("teacher", self.teacher)
        for name, known in (
            ("teacher_dtype", TEACHER_DTYPES),
            ("objective", OBJECTIVES),
            ("attention_loss", HIDDEN_LOSSES),
            ("hidden_loss", HIDDEN_LOSSES),
        ):
            check_choice(name, getattr(self, name), known)
        if self.objective == "attention" and self.forward_prefetch:
            raise ValueError('forward_prefetch must be 0 with the objective "attention", which calls no whole blocks')
        object.__setattr__(self, "needles", check_texts("needles", self.needles, what="names of needle tasks"))
        for task in self.needles:
            check_choice("a needle task", task, NEEDLE_TASKS)
        for name in ("kl_weight", "hidden_weight", "text_weight"):
            check_number(name, getattr(self, name), low=0)
        check_positive("temperature", self.temperature)
        if self.objective == "logits" and not self.kl_weight + self.hidden_weight:
            raise ValueError(
                'kl_weight or hidden_weight must be above 0 with the objective "logits", got 0 and 0; for the next-token loss '
                'alone choose the objective "text"'
            )
        if self.cache_teacher is True or not isinstance(self.cache_teacher, (str, bool)) or self.cache_teacher == "":
            raise TypeError(
                f"cache_teacher must be the path of a folder, or False, got {describe_value(self.cache_teacher)}"
            )
        if self.cache_teacher:
            check_path("cache_teacher", self.cache_teacher, "the path of a folder")
        read_selection(self.selection)

    @property
    def needs_teacher(self) -> bool:
        """Whether the objective compares with a teacher."""
        return self.objective != "text"

    @property
    def reads_logits(self) -> bool:
        """Whether the loss depends on the output layer."""
        return self.objective == "text" or (self.objective == "logits" and self.kl_weight + self.text_weight > 0)

    def trained_parameters(self, model: Any) -> tuple[str, ...]:
        if self.train:
            return self.train
        if self.objective == "attention":
            return tuple(f"model.layers.{layer}.self_attn.*" for layer in model.memory_layers())
        if self.reads_logits:
            return ()
        return tuple(name for name, _ in model.named_parameters() if not name.startswith("lm_head."))

    @property
    def teacher_content(self) -> str:
        """A hash that tells the teacher from others: of its settings, and the sizes and first bytes of its weights."""
        return sample_model(find_saved_model(Path(self.teacher)))

    def fingerprints(self) -> dict[str, str]:
        return {"teacher_content": self.teacher_content} if self.needs_teacher else {}

    def memory_beside(self, processes: int = 1) -> dict[str, float]:
        if not (self.needs_teacher and self.teacher):
            return {}
        model = empty_model(load_config(find_saved_model(Path(self.teacher))))
        model.to(torch.float32 if self.teacher_dtype == "float32" else torch.bfloat16)
        if self.teacher_dtype == "int8":
            quantize_linears(model)
        blocks = sum(p.nbytes for block in teacher_blocks(model) for p in block.parameters())
        whole = sum(p.nbytes for p in model.parameters())
        return {"teacher": whole - blocks + blocks / (processes if self.fsdp else 1)}

    def models_read(self) -> tuple[str, ...]:
        return (*super().models_read(), *([self.teacher] if self.needs_teacher and self.teacher else []))
