"""Loads a saved language model and its tokenizer, and checks that they belong together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ..checks import check_choice, check_device, describe_value
from ..data.text.tokenizer import load_tokenizer as load_any_tokenizer
from ..data.text.tokenizer import vocabulary_size
from ..files import Own, any_file
from ..kinds import checked
from ..untrusted import AsksForCode, check_folder, one_line, read_json_object
from .card import TOKENIZER_FILES, USES, has_tokenizer, is_card
from .configuration import FastWeightsConfig
from .weight_files import check_fit, check_memory, check_weights

__all__ = [
    "DTYPES",
    "SAVED_MODEL",
    "TOKENIZER_PARTS",
    "check_has_tokenizer",
    "check_special_tokens",
    "check_vocabulary",
    "empty_model",
    "find_saved_model",
    "has_tokenizer",
    "is_own_type",
    "load_config",
    "load_language_model",
    "load_tokenizer",
    "load_weights",
    "loading",
    "model_folder",
    "name_models_inside",
]

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("float32", "bfloat16", "float16")
HYBRID = "fastweights_"  # how the types of hybrids begin

# Every file that a tokenizer may be saved in.
TOKENIZER_PARTS = (
    *(*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json"),
    *("vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
)
# What a folder of a saved model and its tokenizer consists of: what a command that saves another model there may delete.
SAVED_NAMES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(*TOKENIZER_PARTS, "training_args.bin"),
)
SAVED_MODEL: Own = {**dict.fromkeys(SAVED_NAMES, any_file), "README.md": is_card}


@checked
def load_language_model(
    path: str | Path, *, device: str = "cpu", dtype: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder that `save_pretrained` wrote, in evaluation mode on `device`.

    The folder may come from a stranger. None of its code is run, weights are read from safetensors files only, and of its
    generation settings only the special tokens are used.

    Args:
        path: that folder, or the folder of a training run, whose model is in its folder model/.
        dtype: "float32", "bfloat16" or "float16"; that of the file when None.
        trust_remote_code: run code of the tokenizer that the folder holds or names.

    Raises:
        ValueError: no such folder, no model or tokenizer in it, a model of another architecture, weights that are damaged or do
            not fit the configuration, a tokenizer with more tokens than the model, a device that is not there, files that ask
            for code to be run or cannot be read safely.
    """
    folder = model_folder(path, trust_remote_code=trust_remote_code)
    check_has_tokenizer(folder)
    check_device(device)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    model, tokenizer = load_weights(folder, dtype), load_tokenizer(folder, trust_remote_code=trust_remote_code)
    check_vocabulary(folder, tokenizer, model.config)
    special = {name: getattr(model.generation_config, name) for name in SPECIAL_TOKENS}
    model.generation_config = GenerationConfig(**special)
    return model.eval().to(device), tokenizer


def model_folder(
    path: str | Path, argument: str = "MODEL", *, trust_remote_code: bool = False, hybrids: bool = True
) -> Path:
    """The folder with config.json, `path` or model/ in it. It is checked to hold a model of this library in files that can be
    read safely. With `trust_remote_code` the files may ask for code. hybrids: whether hybrids of models of transformers are
    taken."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{argument} must be a folder with a saved model, {path} is none; a training run writes one to model/"
        )
    folder = find_saved_model(path)
    check_folder(folder, trust_remote_code=trust_remote_code)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{path} holds no model: there is no config.json in it nor in its folder model/{name_models_inside(path)}"
        )
    model_type = read_json_object(folder / "config.json").get("model_type")
    if not is_own_type(model_type):
        raise ValueError(
            f"{folder} must hold a model of type 'fastweights', got {model_type!r}; `fastweights convert` makes one "
            "from some other architectures"
        )
    if not hybrids and model_type != "fastweights":
        raise ValueError(
            f"{folder} must hold a model of type 'fastweights', got {model_type!r}: this command takes no hybrids of models of "
            "transformers; `fastweights generate`, `evaluate`, `train` and `distill` do"
        )
    return folder


def is_own_type(model_type: object) -> bool:
    """Whether models of this type are of this library: its own, or hybrids of models of transformers."""
    return isinstance(model_type, str) and (model_type == "fastweights" or model_type.startswith(HYBRID))


def empty_model(config: Any) -> Any:
    """The model of a configuration, on the meta device: without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def find_saved_model(path: Path) -> Path:
    """`path`, or its folder model/ where only that holds a model, as in the folder of a training run."""
    inside = path / "model"
    is_run = not (path / "config.json").is_file() and (inside / "config.json").is_file()
    return inside if is_run else path


def name_models_inside(path: Path) -> str:
    """Part of a message: the models in `path`, the output of a training of several; empty where there are none."""
    found = sorted(str(config.parent.parent) for config in path.glob("*/model/config.json"))[:4]
    return f"; it holds trained models, name one of them: {', '.join(found)}" if found else ""


def check_has_tokenizer(folder: Path) -> None:
    """ValueError if the folder has no tokenizer."""
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} holds no tokenizer; save it there with tokenizer.save_pretrained(folder)")


def load_config(folder: Path) -> Any:
    """The configuration in a folder, of this library or of another architecture of transformers. ValueError if it does not fit,
    or if the weights beside it are not safe to load."""
    with loading(f"the model in {folder}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if isinstance(config, FastWeightsConfig):
        _check_has_output_layer(folder, config)
    check_special_tokens(folder)
    shapes = check_weights(folder, config)
    with loading(f"the model in {folder}"):
        model = empty_model(config)
    check_fit(folder, shapes, model, exactly=is_own_type(config.model_type))
    return config


def _check_has_output_layer(folder: Path, config: Any) -> None:
    """ValueError if the model was saved with the head of another task."""
    named = config.architectures if isinstance(config.architectures, list) else []
    for use in (USES.get(str(name)) for name in named):
        if use is not None and use.auto_class not in ("AutoModelForCausalLM", "AutoModel"):
            raise ValueError(
                f"{folder} must hold a language model, got a model for {use.task}; load it with {use.auto_class}"
            )


def check_special_tokens(folder: Path) -> None:
    """ValueError unless all special tokens that generation_config.json names are whole numbers. The file may be missing."""
    path = folder / "generation_config.json"
    settings = read_json_object(path) if path.is_file() else {}
    for name in SPECIAL_TOKENS:
        found = settings.get(name)
        for token in found if isinstance(found, list) else [found]:
            if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
                raise ValueError(f"{path} must give a whole number as {name}, got {describe_value(token)}")


def check_vocabulary(folder: Path, tokenizer: Any, config: Any) -> None:
    """ValueError if the tokenizer has tokens that the model does not know."""
    if vocabulary_size(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} must have at most the model's {config.vocab_size:,} tokens, "
            f"got {vocabulary_size(tokenizer):,}; put the tokenizer there that the model was trained with"
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a `model_folder`; ValueError if it is damaged, or needs code of its own that is not trusted."""
    files = " and ".join(name for name in TOKENIZER_FILES if (folder / name).is_file())
    with loading(f"the tokenizer in {folder} ({files})"):
        return load_any_tokenizer(folder, trust_remote_code=trust_remote_code)


def load_weights(folder: Path, dtype: str | None = None) -> Any:
    """The model in a folder, of this library or of another architecture of transformers. ValueError unless its weights are
    whole. Those of this library must be exactly those of the configuration."""
    config = load_config(folder)
    check_memory(folder)
    config.use_cache = True  # transformers' Trainer sets it to False, and earlier versions saved that
    with loading(f"the model in {folder}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = loaded
    for kind in report if is_own_type(config.model_type) else ("missing_keys",):
        if report[kind]:  # whatever the headers did not show
            raise ValueError(
                f"the weights in {folder} are not those of its config.json, {kind}: {one_line(report[kind])}"
            )
    return model


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Raise errors of transformers, tokenizers and safetensors, which have no common class, as ValueError. Warnings of
    transformers are silenced: later checks refuse what they are about."""
    with _quietly():
        try:
            yield
        except AsksForCode:
            raise
        except Exception as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
            raise ValueError(f"{what} cannot be loaded: {one_line(reason)}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Switch off warnings and progress bars of transformers."""
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
