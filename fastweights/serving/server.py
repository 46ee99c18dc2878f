"""`fastweights serve`: a saved model behind vLLM's server, which speaks the protocol of OpenAI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_positive, check_size
from ..models.loading import DTYPES, check_has_tokenizer, check_vocabulary, load_config, load_tokenizer, model_folder
from ..safe_path import safe_children
from .vllm.version import check_version

__all__ = ["SERVER", "serve", "server_command"]

SERVER = "vllm.entrypoints.launchers.api_server.entry"  # the command `vllm` does not start in the package for CPUs
LARGEST_PORT = 65_535


def server_command(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_model_len: int = 8192,
    memory: float | None = None,
    dtype: str | None = None,
    name: str | None = None,
    others: Sequence[str] = (),
) -> list[str]:
    """The command that starts vLLM's server with a model of ours, whose files are checked first.

    Args:
        model: folder of a saved model, or of a training run.
        max_model_len: tokens of a prompt and its continuation at most.
        memory: GiB for the states of all sequences and the keys of softmax layers; on a GPU what vLLM takes by itself when
            None, on a CPU 2.
        dtype: "float32", "bfloat16" or "float16"; that of the file when None.
        name: what requests call the model; `model` when None.
        others: options of `vllm serve`, which go before these.

    Raises:
        ValueError: vLLM is missing or of another version, no such model or tokenizer, a tokenizer with more tokens than the
            model, a number that does not fit.
    """
    check_version()
    check_size("port", port, high=LARGEST_PORT)
    check_size("max_model_len", max_model_len)
    if memory is not None:
        check_positive("memory", memory)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    folder = model_folder(model)
    config = load_config(folder)
    check_has_tokenizer(folder)
    check_vocabulary(folder, load_tokenizer(folder), config)
    if memory is None and not _has_gpu():
        memory = 2.0
    options = ["--host", host, "--port", str(port), "--max-model-len", str(max_model_len)]
    options += ["--served-model-name", str(model) if name is None else name, "--dtype", dtype or _dtype_of(config)]
    if memory is not None:
        options += ["--kv-cache-memory-bytes", str(int(memory * 2**30))]
    return [sys.executable, "-m", SERVER, "--model", str(folder), *options, *others]


def serve(command: Sequence[str]) -> None:
    """Run the server in the place of this process, so that signals reach it."""
    with safe_children():
        os.execv(command[0], list(command))


def _dtype_of(config: Any) -> str:
    """The dtype of the saved weights: vLLM by itself rounds float32 to bfloat16."""
    return str(config.dtype).removeprefix("torch.") if config.dtype is not None else "float32"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
