"""The model of a run, and whether the tokenizer is the one it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from ...data.text import TextTokenizer
from ...models import FastWeightsConfig, FastWeightsForCausalLM, preset
from .run import LanguageRun

__all__ = ["build_model", "mixer_name", "model_config", "model_tokenizer"]


def model_tokenizer(run: LanguageRun) -> TextTokenizer:
    """The tokenizer that the run asks for; where it continues a model and asks for none, the model's own."""
    path = run.model.get("path")
    if path is not None and run.tokenizer == TextTokenizer() and _tokenizer_in(path) is not None:
        return TextTokenizer(path=path)
    return run.tokenizer


def model_config(run: LanguageRun, tokenizer: Any) -> FastWeightsConfig:
    """The configuration of the run's model.

    Raises:
        ValueError: a preset that does not exist, fields that do not fit, a folder without a model of this library, or a
            tokenizer with other tokens than the model's.
    """
    fields = dict(run.model)
    if "path" in fields:
        config = _config_in(str(fields["path"]))
        own = _tokenizer_in(str(fields["path"]))
        if own is not None and own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"tokenizer must be the one that the model in {fields['path']} was trained with, but its {len(tokenizer)} tokens "
                f"are not the model's {len(own)}; leave [tokenizer] out to use the model's own"
            )
    else:
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        fields = {"vocab_size": len(tokenizer), **special, **fields}
        name = fields.pop("preset", None)
        config = FastWeightsConfig(**fields) if name is None else preset(name, **fields)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"model must have an entry for every token, but the tokenizer has {len(tokenizer)} and vocab_size is "
            f"{config.vocab_size}; use the model's tokenizer, or leave vocab_size out"
        )
    return config


def build_model(run: LanguageRun, config: FastWeightsConfig) -> FastWeightsForCausalLM:
    """The model to train, with the weights of the folder it continues from, or first weights from the run's seed."""
    if "path" in run.model:
        return FastWeightsForCausalLM.from_pretrained(run.model["path"], config=config, dtype=torch.float32)
    torch.manual_seed(run.seed)
    return FastWeightsForCausalLM(config)


def mixer_name(config: FastWeightsConfig) -> str:
    """What a model is called: the mixer that all its layers have, or "hybrid"."""
    names = {name for name, _ in config.mixers()}
    return names.pop() if len(names) == 1 else "hybrid"


def _config_in(path: str) -> FastWeightsConfig:
    if not Path(path, "config.json").is_file():
        raise ValueError(f"model path {path} must be a folder with a model's config.json, but there is none")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"model path {path} cannot be loaded: {error}") from None
    if not isinstance(config, FastWeightsConfig):
        raise ValueError(
            f"model path {path} holds a model of another architecture, {config.model_type!r}; only models of type "
            f"{FastWeightsConfig.model_type!r} can be continued"
        )
    return config


def _tokenizer_in(path: str) -> Any:
    if not Path(path, "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
