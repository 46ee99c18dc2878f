"""torch.compile in a training: what is compiled, and how a step is kept from compiling again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...environment import code_version
from ...private_torch import allow_compilations, import_compiler, keep_blocks_whole, size_may_change
from .run import LanguageRun

__all__ = ["compile_model", "compiler_loading", "what_to_compile", "mark_document_count_dynamic"]

BACKEND = "inductor"
KEPT = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable for the folder of compiled code
TEMPORARY = "torchinductor_"  # how the name of the folder begins that torch sets by default
_set_here: set[str] = set()  # folders of earlier trainings of this process, which no user has named


def what_to_compile(run: LanguageRun) -> bool | str:
    """`run.compile`; where it is None, "blocks" on a GPU and nothing without one."""
    return run.compile if run.compile is not None else "blocks" if torch.cuda.is_available() else False


@contextmanager
def compiler_loading(what: bool | str, device: torch.device) -> Iterator[None]:
    """Inside, a thread imports torch's compiler and starts the GPU, where something is to be compiled.

    Both take seconds, as does drawing the first weights of a model, which leaves Python idle.
    """

    def load() -> None:
        import_compiler()
        torch.zeros(1, device=device)

    with ThreadPoolExecutor(1) as pool:
        if what is not False:
            pool.submit(load)  # what fails here fails again where it is used
        yield


def compile_model(model: Any, what: bool | str, cache: str, blocks: Iterable[Any] | None = None) -> None:
    """Compile every block ("blocks"), the whole model (True) or nothing, when it is first called. Names of parameters stay.

    All blocks of one kind share what is compiled for the first, so blocks start sooner than a whole model. Compiled code is
    kept in the folder `cache`, where a later training finds it, unless torch's own variable names a folder. What this
    process has compiled before is forgotten: torch counts all of it, and past a limit would leave blocks uncompiled. blocks: the
    modules that a step calls, where these are not the blocks of the model.
    """
    if what is False:
        return
    named = os.environ.get(KEPT, TEMPORARY)
    if Path(named).name.startswith(TEMPORARY) or named in _set_here:
        # torch looks kept code up by the graph, which does not hold the shapes that an op says it gives.
        version = code_version("kernels", "ops")
        os.environ[KEPT] = str(Path(cache).absolute() / f"compiled-{version}")
        _set_here.add(os.environ[KEPT])
    torch.compiler.reset()
    kinds = {repr(mixer) for mixer in model.config.mixers()}
    allow_compilations(len(kinds))
    if what == "blocks":
        keep_blocks_whole()
    for module in (blocks or model.model.layers) if what == "blocks" else [model]:
        module.compile(backend=BACKEND)


def mark_document_count_dynamic(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, whose cumulative lengths torch.compile must not take to be as many in every step.

    One document, for which torch.compile would make code of its own, gets an empty one behind it.
    """
    cu_seqlens = batch.get("cu_seqlens")
    if isinstance(cu_seqlens, Tensor):
        if len(cu_seqlens) == 2:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:]])
        size_may_change(cu_seqlens, 0)
        batch = {**batch, "cu_seqlens": cu_seqlens}
    return batch
