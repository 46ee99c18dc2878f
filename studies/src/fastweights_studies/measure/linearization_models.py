"""The models of `linearization.py`: the teacher's first weights, the teacher, and students before they learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastweights.data.text import prepare_text
from fastweights.files import staged_folder
from fastweights.models import linearize
from fastweights.models.loading import find_saved_model, load_tokenizer, load_weights
from fastweights.training.language import LanguageRun
from fastweights_studies.record import Plain

__all__ = ["Student", "write_start", "write_student", "write_teacher"]

ANY = "gdn"  # the memory of hybrids without one


@dataclass(frozen=True, kw_only=True)
class Student:
    """A hybrid: the mixer of its memories with options, the layers that keep attention, and the seed of first values and data."""

    memory: str
    options: Mapping[str, Plain]
    kept: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.memory}-{self.kept.replace(':', '')}-seed{self.seed}"


def write_start(folder: Path, sizes: Mapping[str, Any], run: LanguageRun) -> None:
    """Write first weights of a Llama, and the tokenizer of the run's text. It is saved as a hybrid that keeps all attention, the
    same model as one that `fastweights train` continues. sizes: fields of `LlamaConfig`."""
    if folder.exists():
        return
    tokenizer = prepare_text(run.corpus, run.tokenizer, run.cache).tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(run.seed)
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer), **special, **sizes}))
    _save(folder, linearize(model, to=ANY, keep="all"), tokenizer)


def write_teacher(folder: Path, trained: Path) -> None:
    """Write the Llama that a hybrid which keeps all attention is."""
    if folder.exists():
        return
    found = find_saved_model(trained)
    hybrid = load_weights(found, "float32")
    fields = {name: x for name, x in hybrid.config.to_dict().items() if not name.startswith("memory")}
    model = LlamaForCausalLM(LlamaConfig.from_dict({**fields, "model_type": "llama"}))
    model.load_state_dict(hybrid.state_dict())
    _save(folder, model, load_tokenizer(found))


def write_student(folder: Path, teacher: Path, student: Student, *, new: bool) -> None:
    """Write the student that is made of a teacher. new: with first weights instead of the teacher's."""
    if folder.exists():
        return
    made: Any = linearize(
        load_weights(teacher, "float32"),
        to=student.memory,
        keep=student.kept,
        seed=student.seed,
        **student.options,  # type: ignore[arg-type]
    )
    if new:
        torch.manual_seed(student.seed)
        made = AutoModelForCausalLM.from_config(made.config)
    _save(folder, made, load_tokenizer(teacher))


def _save(folder: Path, model: Any, tokenizer: Any) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(folder) as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
