"""torch.compile in a training: what is compiled, and how a step is kept from compiling again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models import FastWeightsForCausalLM
from .run import LanguageRun

__all__ = ["compile_model", "what_to_compile", "with_any_number_of_documents"]

BACKEND = "inductor"
KEPT = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable for the folder of compiled code


def what_to_compile(run: LanguageRun) -> bool | str:
    """`run.compile`; where it is None, "blocks" on a GPU and nothing without one."""
    return run.compile if run.compile is not None else "blocks" if torch.cuda.is_available() else False


def compile_model(model: FastWeightsForCausalLM, what: bool | str, cache: str) -> None:
    """Compile every block ("blocks"), the whole model (True) or nothing, when it is first called. Names of parameters stay.

    All blocks of one kind share what is compiled for the first, so blocks start sooner than a whole model. Compiled code is
    kept in the folder `cache`, where a later training finds it, unless torch's own variable names another folder.
    """
    if what is False:
        return
    os.environ.setdefault(KEPT, str(Path(cache).absolute() / "compiled"))
    for module in model.model.layers if what == "blocks" else [model]:
        module.compile(backend=BACKEND)


def with_any_number_of_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, whose cumulative lengths torch.compile must not take to be as many in every step."""
    cu_seqlens = batch.get("cu_seqlens")
    if isinstance(cu_seqlens, Tensor):
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return batch
