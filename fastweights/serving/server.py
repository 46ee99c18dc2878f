"""`fastweights serve`: a saved model behind vLLM's server, which speaks the protocol of OpenAI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checks import LARGEST_COUNT, check_choice, check_number, check_path, check_size, check_text, check_texts
from ..models.loading import DTYPES, check_has_tokenizer, check_vocabulary, load_config, load_tokenizer, model_folder
from ..safe_path import safe_children
from .vllm import check_version
from .vllm.versions import server_module

__all__ = ["serve", "server_command"]

LARGEST_PORT = 65_535
LARGEST_MEMORY = 2**20  # GiB
SMALLEST_MEMORY = 2**-14
# Options of vLLM that would have it serve, or read, something else than the folder that was checked.
OF_THE_MODEL = ("--model", "--model-tag", "--tokenizer", "--hf-config-path")


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
        host: the address to listen at.
        memory: GiB for the states of all sequences and the keys of softmax layers; on a GPU what vLLM takes by itself when
            None, on a CPU 2.
        dtype: "float32", "bfloat16" or "float16"; that of the file when None.
        name: what requests call the model; `model` when None.
        others: options of `vllm serve`. None may name another model or tokenizer: only the files of `model` are checked.

    Raises:
        ValueError: vLLM is missing or of another version, no such model or tokenizer, a hybrid, a tokenizer with more tokens than
            the model, a value that does not fit.
        TypeError: a value of a wrong kind.
    """
    model = check_path("model", model, "a folder with a saved model")
    _check_word("host", host, "the address to listen at, such as 127.0.0.1")
    check_size("port", port, high=LARGEST_PORT)
    check_size("max_model_len", max_model_len, high=LARGEST_COUNT)
    if memory is not None:
        check_number("memory", memory, low=SMALLEST_MEMORY, high=LARGEST_MEMORY)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    if name is not None:
        _check_word("name", name, "what requests call the model")
    _check_others(others)
    folder = model_folder(model, hybrids=False)
    check_version()
    config = load_config(folder)
    check_has_tokenizer(folder)
    check_vocabulary(folder, load_tokenizer(folder), config)
    if memory is None and not torch.cuda.is_available():
        memory = 2.0
    options = ["--host", host, "--port", str(port), "--max-model-len", str(max_model_len)]
    options += ["--served-model-name", str(model) if name is None else name, "--dtype", dtype or _saved_dtype(config)]
    if memory is not None:
        options += ["--kv-cache-memory-bytes", str(int(memory * 2**30))]
    return [sys.executable, "-m", server_module(), "--model", str(folder), *options, *others]


def _check_word(name: str, x: object, what: str) -> None:
    text = check_text(name, x, what=what, empty=False)
    if not text.isprintable() or " " in text:
        raise ValueError(f"{name} must be {what}, without spaces and control characters, got {text!r}")


def _check_others(others: object) -> None:
    """vLLM takes a model in several ways, of two the last one, and options by the beginnings of their names too."""
    given = check_texts("others", others, what="options of vllm serve")
    if given and not given[0].startswith("-"):
        raise ValueError(
            f"others must be options of vllm serve, one MODEL being served at a time, got {given[0]!r}; leave it out"
        )
    for option in given:
        name = option.partition("=")[0].replace("_", "-")
        if len(name) > 2 and any(full.startswith(name) for full in OF_THE_MODEL):
            raise ValueError(
                f"others must not name a model or tokenizer beside MODEL, whose files alone are checked, got {option!r}; "
                "leave it out"
            )


def serve(command: Sequence[str]) -> None:
    """Run the server in the place of this process, so that signals reach it."""
    with safe_children():
        os.execv(command[0], list(command))


def _saved_dtype(config: Any) -> str:
    """The dtype of the saved weights: vLLM by itself rounds float32 to bfloat16."""
    return str(config.dtype).removeprefix("torch.") if config.dtype is not None else "float32"
