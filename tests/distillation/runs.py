"""A teacher, its student and distillations that take a fraction of a second."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fastweights.data.text import prepare_text
from fastweights.distillation import DistillRun
from fastweights.models import linearize

from ..training.language.small import SHARD, log, small_run

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}


def make_teacher(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**{"vocab_size": 300, **SIZES, "bos_token_id": None, "eos_token_id": 0, **changes})
    return LlamaForCausalLM(config).eval()


def write_models(folder: Path) -> None:
    """`folder`/teacher and `folder`/student, whose layers 0 and 2 have memories, and text with tokens."""
    run = small_run(folder)
    tokenizer = prepare_text(run.corpus, run.tokenizer, run.cache).tokenizer
    teacher = make_teacher(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    student = linearize(teacher, to="gdn", keep=[1])
    student.config.teacher = str(folder / "teacher")
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def distill_run(folder: Path, **changes: Any) -> DistillRun:
    """A distillation of the models in `folder`."""
    usual = small_run(folder)
    names = (
        "cache",
        "corpus",
        "length",
        "batch_size",
        "learning_rate",
        "log_every",
        "evaluate_every",
        "evaluation_rows",
    )
    return DistillRun(
        **{
            **{name: getattr(usual, name) for name in names},
            "output": str(folder / "out"),
            "model": {"path": str(folder / "student")},
            "teacher_dtype": "float32",
            "max_steps": 6,
            "checkpoint_every": 4,
            "context_lengths": (),
            **changes,
        }
    )


def save(model: Any, models: Path, folder: Path, tokenizer: Any = None) -> str:
    """The folder, with the model and a tokenizer, that of `models` where none is given."""
    model.save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(models / "teacher")).save_pretrained(folder)
    return str(folder)


def assert_same_bits(run: DistillRun, other: DistillRun, step: int = 6) -> None:
    """Two trainings have the same log, model and moments."""
    assert log(run) == log(other)
    for name in ("model/model.safetensors", f"checkpoints/checkpoint-{step}/{SHARD}"):
        assert Path(run.output, name).read_bytes() == Path(other.output, name).read_bytes()
