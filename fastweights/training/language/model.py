"""The model of a run, whether the tokenizer is the one it was made for, and what its card says of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..._version import __version__
from ...checks import check_choice
from ...conversion.convert import convert, fitting_config
from ...data.text import TextCorpus, TextTokenizer
from ...data.text.tokenizer import vocabulary_size
from ...layers.choice import split_entry
from ...models import FastWeightsConfig, FastWeightsForCausalLM, preset
from ...models.loading import empty_model, has_tokenizer, load_config, load_tokenizer, load_weights, model_folder
from ..checkpoints import checkpoints_in
from ..first_weights import draw_by_name
from ..optimization import choose_trained
from .processes import world_size
from .run import LanguageRun

__all__ = [
    "build_model",
    "model_config",
    "model_name",
    "model_tokenizer",
    "model_to_plan",
    "moments_of",
    "started_folder",
    "training_facts",
]


def model_tokenizer(run: LanguageRun) -> TextTokenizer:
    """The tokenizer of the run; where the run continues a model and names none, the model's own.

    Raises:
        ValueError: the run continues a model that has no tokenizer, and names none.
    """
    if "path" not in run.model or run.tokenizer.exists:
        return run.tokenizer
    trusted = run.tokenizer.trust_remote_code
    folder = started_folder(run)
    if not has_tokenizer(folder):
        raise ValueError(
            f"tokenizer path must name the tokenizer that the model in {folder} was trained with, as there is none beside the "
            "model; set path in [tokenizer]"
        )
    if replace(run.tokenizer, processes=1) == TextTokenizer(trust_remote_code=trusted):
        return replace(run.tokenizer, path=str(folder))
    return run.tokenizer


def model_config(run: LanguageRun, tokenizer: Any = None, before: Any = None) -> Any:
    """The configuration of the run's model: a `FastWeightsConfig`, or that of a hybrid which the run continues. It has the tokens
    of the tokenizer, where there is one already. before: that of the model which the run continues, where a stage before makes
    it.

    Raises:
        ValueError: a preset that does not exist, fields that do not fit, a folder without a model of this library, or a
            tokenizer with other tokens than the model's.
    """
    fields = dict(run.model)
    if "path" in fields:
        config = _changed_config(run, load_config(started_folder(run)) if before is None else before)
    else:
        if tokenizer is not None:
            special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            fields = {"vocab_size": vocabulary_size(tokenizer), **special, **fields}
        name = fields.pop("preset", None)
        config = FastWeightsConfig(**fields) if name is None else preset(name, **fields)
    if tokenizer is not None and before is None:
        _check_tokenizer(run, config, tokenizer)
    return config


def _changed_config(run: LanguageRun, config: Any) -> Any:
    """The configuration of a model that is continued, with the mixer and the options that the run asks for.

    Raises:
        ValueError: no layer continues as that mixer, there is no layer for an option, or an option changes weights.
    """
    if not isinstance(config, FastWeightsConfig):
        for key in sorted(run.model.keys() & {"mixer", "options"}):
            raise ValueError(
                f"model must have nothing beside path where that is a hybrid, {config.model_type}, got {key}; `fastweights "
                "convert` chooses the memories of its layers"
            )
        return config
    name, options = _target(run)
    if name is not None:
        config = fitting_config(config, name, options)
    if "options" not in run.model:
        return config
    changes = run.model["options"]
    if not isinstance(changes, Mapping) or not all(isinstance(new, Mapping) for new in changes.values()):
        raise TypeError(f"options of model must be tables of options by the names of mixers, got {changes!r}")
    layers = config.mixers()
    for mixer in changes:
        check_choice("a key of options in model", mixer, sorted({name for name, _ in layers}))
    entries = [{"name": name, **options, **changes.get(name, {})} for name, options in layers]
    listed = {"mixer": entries, "softmax_layers": [], "softmax_options": None}
    changed = FastWeightsConfig.from_dict({**config.to_dict(), **listed})
    there, here = (
        {name: tuple(x.shape) for name, x in empty_model(one).state_dict().items()} for one in (config, changed)
    )
    if there != here:
        raise ValueError(
            f"options of model must leave the weights as they are, got {dict(changes)}; choose others, or convert with mixer"
        )
    return changed


def _target(run: LanguageRun) -> tuple[str | None, dict[str, Any]]:
    """Name and options of the mixer that a continued model is converted to."""
    return split_entry(run.model["mixer"], "model mixer") if "mixer" in run.model else (None, {})


def model_to_plan(run: LanguageRun, config: Any) -> Any:
    """The model of a configuration as the run trains it, without memory for its weights.

    Raises:
        ValueError: `train` names no parameter.
    """
    model = empty_model(config)
    choose_trained(model, run.trained_parameters(model))
    return model


def build_model(run: LanguageRun, config: Any) -> Any:
    """The model to train, with the weights of the folder it continues from, or first weights from the run's seed. What another
    mixer adds to a model that continues starts from first values (`fastweights.conversion.CONVERSIONS`).

    Raises:
        ValueError: the folder's weights are damaged, or not those of its configuration.
    """
    if "path" in run.model:
        model = _continued(run, config)
    else:
        torch.manual_seed(run.seed)
        model = FastWeightsForCausalLM(config)
        if run.seed_by_name:
            draw_by_name(model, run.seed)
    choose_trained(model, run.trained_parameters(model))
    return model


def _continued(run: LanguageRun, config: Any) -> Any:
    """The model of the folder that the run continues from, with the run's mixer and options."""
    model = load_weights(started_folder(run), "float32")
    name, options = _target(run)
    if name is not None:
        model = convert(model, to=name, seed=run.seed, **options)
    if "options" not in run.model:
        return model
    changed = FastWeightsForCausalLM(config)
    changed.load_state_dict(model.state_dict())
    return changed


def moments_of(run: LanguageRun) -> Path | None:
    """The checkpoint whose optimizer's moments the run begins with, if it asks for any.

    Raises:
        ValueError: there is none.
    """
    if not run.keep_optimizer:
        return None
    place = Path(str(run.model["path"]))
    found = [one for folder in (place, place.parent) for one in checkpoints_in(folder / "checkpoints")[-1:]]
    if not found:
        raise ValueError(
            f"keep_optimizer needs the last checkpoint of the training of {place}, and there is none in its folder "
            "checkpoints; set it to false"
        )
    return found[0]


def model_name(run: LanguageRun, config: Any) -> str:
    """The run's label, or the mixer that all layers have, or "hybrid"."""
    if run.label:
        return run.label
    names = {name for name, _ in config.mixers()}
    return names.pop() if len(names) == 1 else "hybrid"


def training_facts(run: LanguageRun, curves: Mapping[str, Any], *, tokens: int) -> dict[str, str]:
    """What the card of a trained model says about its training, by what a reader looks for. Paths of this machine are left out: a
    card is published. curves: the points of the log, see `loss_curves`."""
    names = {"adamw": "AdamW", "muon": "Muon and AdamW", "adafactor": "Adafactor"}[run.optimizer]
    facts = {
        "Text": _text(run),
        "Steps": f"{run.max_steps:,}",
        "Tokens read": f"{tokens:,}, in rows of {run.length:,}",
        "Optimizer": f"{names}, weight decay {run.weight_decay:g}, beta {run.beta1:g} and {run.beta2:g}",
        "Learning rate": run.describe_rate(run.plan(world_size())),
        "Precision": {"no": "float32"}.get(run.precision, run.precision),
        "Seed": f"{run.seed}",
    }
    if "path" in run.model:
        facts["Continued from"] = Path(str(run.model["path"])).name
    if curves["held_out_losses"]:
        facts["Held-out loss"] = f"{curves['held_out_losses'][-1]:.4f} nats per token"
    return facts | {"Trained with": f"fastweights {__version__}"}


def _text(run: LanguageRun) -> str:
    if run.corpus.sources:
        return "; ".join(
            f"{weight:g} parts of {_source(single)}" for single, weight in zip(run.corpus.singles, run.corpus.weights)
        )
    return _source(run.corpus)


def _source(corpus: TextCorpus) -> str:
    if corpus.dataset is not None:
        return f"the dataset {corpus.dataset}"
    names = [Path(path).name for path in corpus.paths]
    return (
        f"files of the trainer's own: {', '.join(names)}"
        if names
        else "source and documentation of a Python installation"
    )


def started_folder(run: LanguageRun) -> Path:
    """The folder of the model that the run continues from."""
    trusted = run.tokenizer.trust_remote_code
    return model_folder(str(run.model["path"]), "model path", trust_remote_code=trusted)


def _check_tokenizer(run: LanguageRun, config: Any, tokenizer: Any) -> None:
    if "path" in run.model and has_tokenizer(started_folder(run)):
        own = load_tokenizer(started_folder(run), trust_remote_code=run.tokenizer.trust_remote_code)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"tokenizer must be the one that the model in {run.model['path']} was trained with, but its {len(tokenizer)} "
                f"tokens are not the model's {len(own)}; leave [tokenizer] out to use the model's own"
            )
    if vocabulary_size(tokenizer) > config.vocab_size:
        raise ValueError(
            f"model must have an entry for every token, but the tokenizer has {vocabulary_size(tokenizer)} and vocab_size is "
            f"{config.vocab_size}; use the model's tokenizer, or leave vocab_size out"
        )
