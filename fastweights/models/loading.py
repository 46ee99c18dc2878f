"""A saved language model and its tokenizer, checked to belong together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checks import check_choice
from ..data.text.tokenizer import vocabulary_size
from .causal_lm import FastWeightsForCausalLM
from .configuration import FastWeightsConfig

__all__ = [
    "has_tokenizer",
    "load_config",
    "load_language_model",
    "load_tokenizer",
    "load_weights",
    "model_folder",
    "saved_in",
]

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
    folder = model_folder(path)
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} holds no tokenizer; save it there with tokenizer.save_pretrained(folder)")
    _check_device(device)
    if dtype is not None:
        check_choice("dtype", dtype, _DTYPES)
    model, tokenizer = load_weights(folder, dtype), load_tokenizer(folder)
    if vocabulary_size(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} must have at most the model's {model.config.vocab_size:,} tokens, "
            f"got {vocabulary_size(tokenizer):,}; put the tokenizer there that the model was trained with"
        )
    return model.eval().to(device), tokenizer


def model_folder(path: str | Path, argument: str = "MODEL") -> Path:
    """The folder, `path` or model/ in it, that holds config.json, checked to be of a model of ours."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{argument} must be a folder with a saved model, {path} is none; a training run writes one to model/"
        )
    folder = saved_in(path)
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
    return folder


def saved_in(path: Path) -> Path:
    """`path`, or its folder model/ where that alone holds a model: the folder of a training run does."""
    inside = path / "model"
    is_run = not (path / "config.json").is_file() and (inside / "config.json").is_file()
    return inside if is_run else path


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer is saved beside the model."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_config(folder: Path) -> Any:
    """The configuration in a `model_folder`; ValueError if it does not fit."""
    with _loading(f"the model in {folder}"):
        return FastWeightsConfig.from_pretrained(folder, local_files_only=True)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a `model_folder`; ValueError if it is damaged."""
    from transformers import AutoTokenizer

    files = " and ".join(name for name in _TOKENIZER_FILES if (folder / name).is_file())
    with _loading(f"the tokenizer in {folder} ({files})"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_weights(folder: Path, dtype: str | None = None) -> Any:
    """The model in a `model_folder`; ValueError unless its weights are whole and exactly those of its configuration."""
    with _loading(f"the model in {folder}"):
        loaded: Any = FastWeightsForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
        )
    model, report = loaded
    for kind, keys in report.items():
        if keys:
            raise ValueError(f"the weights in {folder} are not those of its config.json, {kind}: {_some(keys)}")
    return model


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Errors of transformers, tokenizers and safetensors, which have no common kind, as one; its warnings are refused later."""
    with _quietly():
        try:
            yield
        except Exception as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{what} cannot be loaded: {reason}") from error


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
        torch.zeros(1, device=device).item()  # the device "meta" keeps no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be a torch device that this machine has, got {device!r}: {error}") from None


def _some(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
