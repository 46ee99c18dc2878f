"""A saved language model and its tokenizer, checked to belong together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_language_model"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_DTYPES = ("float32", "bfloat16", "float16")


def load_language_model(path: str | Path, *, device: str = "cpu", dtype: str | None = None) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder as `save_pretrained` writes it, in evaluation mode on `device`.

    Args:
        path: that folder, or the folder of a training run, whose model is in its folder model/.
        dtype: "float32", "bfloat16" or "float16"; that of the file when None.

    Raises:
        ValueError: no such folder, no model or tokenizer in it, a model of another architecture, weights that are damaged or
            not those of the configuration, a tokenizer with more tokens than the model, a device that is not there.
    """
    from transformers import AutoTokenizer

    from ..models import FastWeightsForCausalLM

    folder = _model_folder(Path(path))
    _check_device(device)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    with _quietly():  # what it would warn of is refused below
        try:
            loaded: Any = FastWeightsForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of safetensors, tokenizers and transformers, which have no common kind
            raise ValueError(f"the model in {folder} cannot be loaded: {error}") from error
    model, report = loaded
    for kind, keys in report.items():
        if keys:
            raise ValueError(f"the weights in {folder} are not those of its config.json, {kind}: {_some(keys)}")
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} must have at most the model's {model.config.vocab_size:,} tokens, "
            f"got {len(tokenizer):,}; put the tokenizer there that the model was trained with"
        )
    return model.eval().to(device), tokenizer


def _model_folder(path: Path) -> Path:
    """The folder that holds config.json, checked to hold a model of ours and a tokenizer."""
    if not path.is_dir():
        raise ValueError(
            f"MODEL must be a folder with a saved model, {path} is none; a training run writes one to model/"
        )
    folder = path if (path / "config.json").is_file() else path / "model"
    if not (folder / "config.json").is_file():
        raise ValueError(f"{path} holds no model: there is no config.json in it nor in its folder model/")
    try:
        model_type = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged: {error}") from None
    if model_type != "fastweights":
        raise ValueError(
            f"{folder} must hold a model of type 'fastweights', got {model_type!r}; `fastweights convert` makes one "
            "from some other architectures"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no tokenizer; save it there with tokenizer.save_pretrained(folder)")
    return folder


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings and no progress bar of transformers."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be a torch device that this machine has, got {device!r}: {error}") from None


def _some(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
