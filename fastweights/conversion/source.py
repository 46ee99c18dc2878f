"""The trained model that a conversion starts from: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import Mamba2Config, PreTrainedModel

from ..models import FastWeightsConfig
from ..models.card import has_tokenizer
from ..models.loading import find_saved_model, load_weights, loading, name_models_inside
from ..untrusted import check_folder, read_json_object

__all__ = ["copy_tokenizer", "load_model", "model_folder"]

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
SETTINGS = ("config.json", "generation_config.json", "model.safetensors.index.json")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")


def model_folder(source: str) -> Path:
    """The folder with the model `source`, of an architecture that conversions start from: that folder, its folder model/ where
    it is that of a training run, or what is downloaded where it is a name on the hub.

    Raises:
        ValueError: no such folder or name, another architecture, or files that cannot be read safely.
    """
    on_hub = not Path(source).is_dir()
    if on_hub and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ValueError(
            f"SOURCE must be a folder or a name on the Hugging Face hub (owner/name), and there is no folder {source}"
        )
    folder = _download(source, *SETTINGS, *TOKENIZER_FILES) if on_hub else find_saved_model(Path(source))
    check_folder(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} must hold a model in transformers' format, and there is no config.json in it nor in its folder model/"
            f"{name_models_inside(folder)}"
        )
    found = read_json_object(folder / "config.json").get("model_type")
    if found not in ARCHITECTURES:
        raise ValueError(
            f"{source} is of architecture {found!r}; conversions start from {' or '.join(map(repr, ARCHITECTURES))} "
            "in transformers' format"
        )
    return _download(source, *SETTINGS, *TOKENIZER_FILES, *WEIGHTS) if on_hub else folder


def load_model(folder: Path) -> tuple[PreTrainedModel, torch.dtype]:
    """The model in a `model_folder` in float32 (float64 if it is stored so), and the dtype it is stored in.

    Raises:
        ValueError: files that are damaged or incomplete.
    """
    model = load_weights(folder)
    stored = model.dtype
    return model.to(torch.promote_types(stored, torch.float32)), stored


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer files of `source` into the folder; returns their names, none where they make no tokenizer."""
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return copied if has_tokenizer(folder) else []


def _download(name: str, *files: str) -> Path:
    """The folder of this machine with those of the files that a model on the hub has."""
    with loading(name):
        return Path(snapshot_download(name, allow_patterns=list(files)))
