"""What a distillation needs of its teacher, student and tokenizer, checked before any work."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..checks import error_prefix
from ..data.text.tokenizer import load_tokenizer as load_any_tokenizer
from ..evaluation import EvaluationSettings
from ..evaluation.ruler import check_fit
from ..models import HybridModel
from ..models.loading import empty_model, find_saved_model, has_tokenizer, load_config, load_tokenizer
from ..training.language.model import model_config, model_tokenizer
from ..training.optimization import choose_trained
from .run import DistillRun

__all__ = ["check_distillation"]

SPECIAL_TOKENS = ("bos_token", "eos_token")


def check_distillation(run: DistillRun) -> DistillRun:
    """The run, with the folder of its teacher where it names none.

    Raises:
        ValueError: a student that is no hybrid, no teacher, a teacher with another vocabulary or, for the objective "attention",
            another architecture; or a tokenizer that is not the teacher's, or has another end of text once it is saved.
    """
    stages: list[Any] = run.stage_runs()
    config = model_config(stages[0])
    student = empty_model(config)
    if not isinstance(student, HybridModel):
        raise ValueError(
            f"model path must be the folder of a hybrid, made of its teacher by `fastweights convert`, got {run.model['path']} "
            f"with a model of type {config.model_type!r}"
        )
    if not run.teacher and not any(stage.needs_teacher for stage in stages):
        return run
    folder = run.teacher or config.teacher
    if not folder:
        raise ValueError(f"teacher must be set: {run.model['path']} does not name the model that it was made of")
    if not Path(folder).is_dir():
        whose = "" if run.teacher else ", the name of the model that the student was made of"
        raise ValueError(
            f"teacher must be the folder of a saved model, got {folder!r}{whose}, which is none; set teacher to it"
        )
    run = dataclasses.replace(run, teacher=str(folder))
    stages[:] = run.stage_runs()
    for stage in stages:
        with error_prefix(f"stage {stage.stage!r}") if stage.stage else nullcontext():
            _check_teacher(stage, student)
    _check_tokenizer(run)
    _check_needles(stages[-1], model_tokenizer(run).load())
    return run


def _check_teacher(run: DistillRun, student: Any) -> None:
    config, own = load_config(find_saved_model(Path(run.teacher))), student.config
    teacher = empty_model(config)
    unknown = {"position_ids", "logits_to_keep"} - inspect.signature(teacher.forward).parameters.keys()
    if unknown:
        raise ValueError(
            f"the teacher must be a causal language model whose forward takes {' and '.join(sorted(unknown))}, which that of a "
            f"{type(teacher).__name__} does not; take the model that the student was made of"
        )
    if config.vocab_size != own.vocab_size:
        raise ValueError(
            f"the teacher must have the student's vocabulary of {own.vocab_size:,} tokens, but {run.teacher} has "
            f"{config.vocab_size:,}; take the model that the student was made of, or resize_token_embeddings of the smaller one"
        )
    if run.objective != "attention" and not (run.objective == "logits" and run.hidden_weight):
        return
    if config.hidden_size != own.hidden_size:
        raise ValueError(
            f"the teacher must have the student's hidden_size of {own.hidden_size:,} with this objective, but {run.teacher} has "
            f'{config.hidden_size:,}; take the model that the student was made of, or objective "logits" with hidden_weight = 0'
        )
    if run.objective == "attention":
        _check_attention(run, student, teacher)
    else:
        _check_output_layer(run, student)


def _check_output_layer(run: DistillRun, student: Any) -> None:
    """ValueError where the output layer is to be trained, and gets no gradient. With tied weights it is the embedding."""
    choose_trained(student, run.trained_parameters(student))
    named = [name for name, p in student.named_parameters() if p.requires_grad and name.startswith("lm_head.")]
    if named and not run.reads_logits:
        raise ValueError(
            f"train must not name parameters of the output layer where kl_weight and text_weight are 0, got {named[0]}, which "
            "gets no gradient; drop it"
        )


def _check_attention(run: DistillRun, student: Any, teacher: Any) -> None:
    """The teacher has attention wherever the student has a memory, and only the latter are to be trained."""
    memories = student.memory_layers()
    if not memories:
        raise ValueError('the student must have a memory with the objective "attention", but all its attention is kept')
    layers = getattr(getattr(teacher, "model", None), "layers", ())
    if any(layer >= len(layers) or not hasattr(layers[layer], "self_attn") for layer in memories):
        raise ValueError(
            f"the teacher must have the student's {student.config.num_hidden_layers} layers of attention with the objective "
            f'"attention", but {run.teacher} is a {type(teacher).__name__} with {len(layers)} layers; take the model that the '
            "student was made of"
        )
    learnt = {id(p) for attention in memories.values() for p in attention.parameters()}
    choose_trained(student, run.trained_parameters(student))
    outside = [name for name, p in student.named_parameters() if p.requires_grad and id(p) not in learnt]
    if outside:
        raise ValueError(
            f'train must name parameters of attention modules with a memory with the objective "attention", which computes '
            f'nothing else, but {outside[0]} is none; use patterns such as "*.self_attn.memory.*", or leave train out'
        )


def _check_tokenizer(run: DistillRun) -> None:
    """ValueError unless the run's tokenizer is the teacher's, and stays it when it is saved with the student."""
    folder = find_saved_model(Path(run.teacher))
    chosen = model_tokenizer(run)
    tokenizer = chosen.load()
    if has_tokenizer(folder):
        _check_same_tokenizer(load_tokenizer(folder), tokenizer, f"the one of the teacher in {folder}")
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        again = load_any_tokenizer(Path(saved), trust_remote_code=chosen.trust_remote_code)
    _check_same_tokenizer(tokenizer, again, "the same once it is saved with the student")


def _check_needles(run: Any, tokenizer: Any) -> None:
    for task in run.needles if run.context_lengths else ():
        with error_prefix("needles must fit into the shortest of context_lengths"):
            shortest, examples = min(run.context_lengths), EvaluationSettings().needle_examples
            check_fit(tokenizer, task, length=shortest, examples=examples, seed=run.seed, text=None)


def _check_same_tokenizer(wanted: Any, got: Any, what: str) -> None:
    if wanted.get_vocab() != got.get_vocab():
        raise ValueError(
            f"tokenizer must be {what}, but its {len(got):,} tokens are not those {len(wanted):,}; set path in [tokenizer] to "
            "the teacher's tokenizer"
        )
    for name in SPECIAL_TOKENS:
        before, after = getattr(wanted, name), getattr(got, name)
        if before != after:
            raise ValueError(
                f"tokenizer must be {what}, but its {name} is {after!r} in place of {before!r}: texts would begin or end with "
                f"another token. Set {name} to {after!r} in the tokenizers of teacher and student and save both, or take another "
                "tokenizer"
            )
    ends = wanted.eos_token
    if (
        ends is not None
        and wanted(ends, add_special_tokens=False).input_ids != got(ends, add_special_tokens=False).input_ids
    ):
        raise ValueError(
            f"tokenizer must be {what}, but it splits the end of text {ends!r} into other tokens; save it anew"
        )
