"""The trained model that a conversion starts from: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..models import FastWeightsConfig
from ..models.loading import has_tokenizer, saved_in

__all__ = ["copy_tokenizer", "load_config", "load_model", "model_folder"]

ARCHITECTURES = (FastWeightsConfig.model_type, Mamba2Config.model_type)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def model_folder(source: str) -> str:
    """`source`, which may be no folder but a name on the hub, or its folder model/ where it is that of a training run."""
    return str(saved_in(Path(source))) if Path(source).is_dir() else source


def load_config(source: str) -> FastWeightsConfig | Mamba2Config:
    """The configuration of `source`.

    Raises:
        ValueError: no such folder or name, or another architecture.
    """
    if not Path(source).is_dir() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ValueError(
            f"SOURCE must be a folder or a name on the Hugging Face hub (owner/name), and there is no folder {source}"
        )
    if Path(source).is_dir() and not Path(source, "config.json").is_file():
        raise ValueError(
            f"{source} must hold a model in transformers' format, and there is no config.json in it nor in its folder model/"
        )
    with _loading(source):
        try:
            found = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
        except (AttributeError, TypeError):  # transformers takes any JSON for an object
            raise ValueError("config.json must be a JSON object with a model_type, and it is none") from None
        if found in ARCHITECTURES:
            return AutoConfig.from_pretrained(source)
    raise ValueError(
        f"{source} is of architecture {found!r}; conversions start from {' or '.join(map(repr, ARCHITECTURES))} "
        "in transformers' format"
    )


def load_model(source: str) -> tuple[PreTrainedModel, torch.dtype]:
    """The model in float32 (float64 if it is stored so), and the dtype it is stored in.

    Raises:
        ValueError: files that are missing, damaged or incomplete.
    """
    with _loading(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto", output_loading_info=True)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{source} is incomplete: its files lack {', '.join(missing[:3])}{' ...' * (len(missing) > 3)}"
        )
    stored = model.dtype
    return model.to(torch.promote_types(stored, torch.float32)), stored


def copy_tokenizer(source: str, folder: Path) -> list[str]:
    """Copy the tokenizer files of `source` into the folder; returns their names, none where they make no tokenizer."""
    copied = []
    for name in TOKENIZER_FILES:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            shutil.copyfile(path, folder / name)
            copied.append(name)
    return copied if has_tokenizer(folder) else []


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Shortens the messages of transformers about files that it cannot load."""
    try:
        yield
    except (OSError, RuntimeError, TypeError, ValueError, SafetensorError, StrictDataclassError) as error:
        said, *more = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"{source} cannot be loaded: {' '.join([said, *more[:1]]) if said.endswith(':') else said}"
        ) from None
