"""From a saved model to a folder with its continuation: model, tokenizer, settings of the training that follows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from .. import untrusted
from ..checks import (
    LARGEST_COUNT,
    check_flag,
    check_path,
    check_positive,
    check_size,
    check_text,
    check_unicode,
    check_whole_number,
)
from ..data.text.tokenizer import load_tokenizer
from ..files import TENSOR_ERRORS, Own, staged_folder, write_bytes, write_json, writing
from ..kinds import checked
from ..models import FastWeightsConfig, FastWeightsForCausalLM
from ..models.card import has_tokenizer, write_card
from ..models.hybrid import FAMILIES
from ..models.loading import TOKENIZER_PARTS, find_saved_model, load_config, load_weights, loading, name_models_inside
from ..models.weight_files import check_fit, check_memory, check_weights, read_weights
from ..outputs import check_folder, claim_folder, described_files, listed_files, lock_path
from .convert import FOREIGN, LogitsCheck, check_logits, convert, fitting_config, own_config
from .flash_linear_attention import FLA_TYPES, fla_config, fla_weights
from .plan import Conversion, find_conversions
from .training import recorded_training, run_file

__all__ = [
    "DESCRIPTION",
    "ConversionReport",
    "check_arguments",
    "check_output",
    "choose_tokens",
    "claim_output",
    "convert_folder",
    "copy_tokenizer",
    "load_model",
    "model_folder",
    "plan_conversion",
    "source_type",
]

DESCRIPTION = "conversion.json"
ARCHITECTURES = (FastWeightsConfig.model_type, *FOREIGN, *FLA_TYPES)
SETTINGS = ("config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_PARTS)
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")


@checked
@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion did, and how the logits compare.

    Attributes:
        conversions: of the layers that were converted, by index.
        layers: how many the model has.
        parameters: how many numbers the model has; new_parameters: how many of them the source lacks.
        check: the comparison of the logits of both models.
        tokenizer: names of the files copied.
        training: the file that records the source's training, whose text and sizes the run file keeps; None without one.
        output: the folder of the new model.
    """

    conversions: Mapping[int, Conversion]
    layers: int
    parameters: int
    new_parameters: int
    check: LogitsCheck
    tokenizer: list[str]
    training: Path | None
    output: Path


@checked
def convert_folder(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    prompt: str | None = None,
    tokens: int = 256,
    seed: int = 0,
    peak: float | None = None,
    steps: int = 2000,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Convert the model `source` (its folder, that of its training run, or a name on the hub) and save it in the folder `output`.

    Weights and logits are worked out in float32 (float64 where the source is stored so) and saved in the dtype that the
    source is stored in. The output appears when everything is written, or not at all.

    Args:
        output: must not exist, or be empty, or be an earlier conversion with `overwrite`.
        to, seed, options: as for `convert`.
        prompt: text on which the logits of both models are compared; random tokens when None.
        tokens: how many of these.
        peak: highest learning rate of the source's training; when None that of the run.json beside the source, else the
            paper's for models of the size. The run file that is written beside the model starts from a tenth of it. It keeps
            the text, tokenizer, rows and precision that run.json, or the train.toml of an earlier conversion, records.
        steps: of the training that this run file describes.
        overwrite: replace an earlier conversion in the output folder. Files that are not as it wrote them are refused.

    Raises:
        ValueError: what `convert` refuses; a source that is missing, damaged or of another architecture; an output that is
            not empty, cannot be made, is in use by another process or to which a link leads; logits that differ where they must
            be equal, or are not finite.
        WriteError: the output could not be written, as where the disk is full. There is none then.
    """
    source, output = check_arguments(
        source, output, overwrite=overwrite, prompt=prompt, tokens=tokens, seed=seed, peak=peak, steps=steps
    )
    with claim_output(source, output, overwrite, ARCHITECTURES) as (own, folder_of_source):
        training = recorded_training(folder_of_source, output)
        before = source_config(folder_of_source)
        after = fitting_config(before, to, options or {})
        model, stored = load_model(folder_of_source)
        converted = convert(model, to=to, seed=seed, **(options or {}))
        check = check_logits(model, converted, choose_tokens(folder_of_source, model, prompt, tokens))
        check.insist()
        parameters = converted.num_parameters()
        with writing("the converted model", output, *TENSOR_ERRORS), staged_folder(output, own or None) as folder:
            converted.to(stored).save_pretrained(folder)  # type: ignore[arg-type]  # transformers' wrapper hides self
            tokenizer = copy_tokenizer(folder_of_source, folder)
            write_card(
                folder, converted, {"Converted from": Path(source).name, "Memory layers now": to, "Trained since": "no"}
            )
            settings = run_file(
                output,
                training=training,
                peak=peak,
                parameters=parameters,
                steps=steps,
                tokenizer=bool(tokenizer),
            )
            write_bytes(folder / "train.toml", settings.encode())
            facts = {"from": source, "to": to, "seed": seed, **asdict(check), "files": listed_files(folder)}
            write_json(folder / DESCRIPTION, facts)
        return ConversionReport(
            conversions=find_conversions(before, after),
            layers=converted.config.num_hidden_layers,
            parameters=parameters,
            new_parameters=parameters - model.num_parameters(),
            check=check,
            tokenizer=tokenizer,
            training=training.file,
            output=output,
        )


def plan_conversion(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """What `convert_folder` would make of the same arguments: the memory layers before and after, the parameters, and where it
    goes. Weights are not read, and nothing is written.

    Raises:
        ValueError: as `convert_folder`, but for damaged weights.
    """
    source, output = check_arguments(source, output, overwrite=overwrite, **others)
    folder = check_output(source, output, overwrite, ARCHITECTURES)
    recorded_training(folder, output)
    before = source_config(folder)
    after = fitting_config(before, to, options or {})
    with torch.device("meta"):
        models = [FastWeightsForCausalLM(config) for config in (before, after)]
    old, new = (model.num_parameters() for model in models)
    return {
        "source": source, "mixers before": [name for name, _ in before.mixers()],
        "mixers after": [name for name, _ in after.mixers()],
        "new layers": sorted(find_conversions(before, after)), "parameters": new, "new parameters": new - old,
        "output": str(output), "run file": str(output / "train.toml"),
    }  # fmt: skip


def check_arguments(
    source: str | Path,
    output: str | Path,
    *,
    overwrite: bool,
    prompt: str | None = None,
    tokens: int = 256,
    seed: int = 0,
    peak: float | None = None,
    steps: int = 2000,
) -> tuple[str, Path]:
    """The source, and the output with a name that the run file can hold: refused before the work, which may take long."""
    source = str(check_path("source", source, "a folder or a name on the Hugging Face hub"))
    output = check_path("output", output, "the path of a folder")
    real = os.path.realpath(output)
    if real == os.getcwd():
        raise ValueError(
            f"output must be a folder with a name of its own, got the current folder, {output}; name another one"
        )
    try:
        real.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"output must have a name in UTF-8 for the run file, got {str(output)!r}; name another"
        ) from None
    check_flag("overwrite", overwrite)
    check_size("steps", steps, high=LARGEST_COUNT)
    check_size("tokens", tokens, high=2**20)
    check_whole_number("seed", seed)
    if peak is not None:
        check_positive("peak", peak)
    if prompt is not None:
        check_text("prompt", check_unicode("prompt", prompt), what="text to compare the logits on", empty=False)
    return source, output


@contextmanager
def claim_output(source: str, output: Path, overwrite: bool, known: Collection[str]) -> Iterator[tuple[Own, Path]]:
    """The output folder is this process's: what an earlier conversion wrote there, and the `model_folder` of the source."""
    with claim_folder("output", output, lambda: _find_earlier(output, overwrite), "conversion") as own:
        folder = model_folder(source, known)
        if own and folder.resolve().is_relative_to(output.resolve()):
            raise ValueError(
                f"output must be another folder than the source, got {output} for {source}; name another one"
            )
        yield own, folder


def check_output(source: str, output: Path, overwrite: bool, known: Collection[str]) -> Path:
    """The `model_folder` of the source, for a plan: the output folder is only checked."""
    with lock_path("output", output):
        check_folder("output", output, lambda: _find_earlier(output, overwrite), "conversion")
    return model_folder(source, known)


def _find_earlier(output: Path, overwrite: bool) -> Own:
    """What an earlier conversion wrote in the output folder, to be replaced."""
    own = described_files(output / DESCRIPTION, "from", "to", "seed")
    if own and not overwrite:
        raise ValueError(
            f"output {output} holds a conversion; name another folder, or pass overwrite to replace that one"
        )
    return own


def choose_tokens(source: Path, model: PreTrainedModel, prompt: str | None, count: int) -> Tensor:
    """[1, T] token ids to compare the models on."""
    if prompt is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(model.config.vocab_size, (1, count), generator=generator)
    try:
        ids = load_tokenizer(source)(prompt, return_tensors="pt").input_ids
    except Exception as error:  # transformers and the tokenizers library raise errors of many kinds here
        raise ValueError(
            f"prompt needs the tokenizer of {source}, which cannot be loaded: {untrusted.one_line(error)}"
        ) from None
    if ids.numel() == 0 or ids.max() >= model.config.vocab_size:
        raise ValueError(f"prompt must give token ids below {model.config.vocab_size}, got {ids.tolist()}")
    return ids.long()


def model_folder(source: str, known: Collection[str]) -> Path:
    """The folder with the model `source`, of one of the types `known`: that folder, its folder model/ where it is that of a
    training run, or what is downloaded where it is a name on the hub.

    Raises:
        ValueError: no such folder or name, another type, or files that cannot be read safely.
    """
    folder, found = _read_type(source)
    kind = found if isinstance(found, str) else ""
    if kind not in known:
        hybrid = kind.startswith("fastweights_")
        hint = "; it has memories already: convert the model that it was made of" if hybrid else ""
        if kind in FAMILIES:
            hint = " (linearize_folder)"
        raise ValueError(
            f"{source} is of architecture {found!r}; memories continue as others in models of the types "
            f"{', '.join(ARCHITECTURES)}, and replace attention in {', '.join(FAMILIES)}{hint}"
        )
    return folder if Path(source).is_dir() else _download(source, *SETTINGS, *WEIGHTS)


def source_type(source: str) -> str:
    """The model_type in the config.json of the model `source`, as `model_folder` finds it; "" where there is none."""
    found = _read_type(str(check_path("source", source, "a folder or a name on the Hugging Face hub")))[1]
    return found if isinstance(found, str) else ""


def _read_type(source: str) -> tuple[Path, Any]:
    """The folder with the settings of a model, and what they call its type."""
    on_hub = not Path(source).is_dir()
    if on_hub and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ValueError(
            f"SOURCE must be a folder or a name on the Hugging Face hub (owner/name), and there is no folder {source}"
        )
    folder = _download(source, *SETTINGS) if on_hub else find_saved_model(Path(source))
    untrusted.check_folder(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} must hold a model in transformers' format, and there is no config.json in it nor in its folder model/"
            f"{name_models_inside(folder)}"
        )
    return folder, untrusted.read_json_object(folder / "config.json").get("model_type")


def source_config(folder: Path) -> FastWeightsConfig:
    """The configuration of the model in a `model_folder`, in this library's form.

    Raises:
        ValueError: files that are damaged or do not fit each other, or a setting that does not carry over.
    """
    record = untrusted.read_json_object(folder / "config.json")
    if record["model_type"] not in FLA_TYPES:
        return own_config(load_config(folder))
    with loading(f"the configuration in {folder}"):
        config = fla_config(record)
    shapes = check_weights(folder, config)
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
        own = fla_weights(config, {name: torch.empty(shape) for name, shape in shapes.items()})
    check_fit(folder, {name: list(weight.shape) for name, weight in own.items()}, model, exactly=True)
    return config


def load_model(folder: Path) -> tuple[PreTrainedModel, torch.dtype]:
    """The model in a `model_folder` in float32 (float64 if it is stored so), and the dtype it is stored in. A model of
    flash-linear-attention is loaded in this library's form, as its own may not be installed.

    Raises:
        ValueError: files that are damaged or incomplete.
    """
    if untrusted.read_json_object(folder / "config.json")["model_type"] in FLA_TYPES:
        config = source_config(folder)
        check_memory(folder)
        model = FastWeightsForCausalLM(config)
        weights = fla_weights(config, read_weights(folder))
        stored = weights["model.embed_tokens.weight"].dtype
        model.to(torch.promote_types(stored, torch.float32))  # type: ignore[arg-type]
        model.load_state_dict(weights, strict=False)  # of a tied output layer nothing is stored
        return model.eval(), stored
    model = load_weights(folder)
    stored = model.dtype
    return model.to(torch.promote_types(stored, torch.float32)), stored


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer files of `source` into the folder; returns their names, none where they make no tokenizer."""
    copied = [name for name in TOKENIZER_PARTS if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return copied if has_tokenizer(folder) else []


def _download(name: str, *files: str) -> Path:
    """The folder of this machine with those of the files that a model on the hub has."""
    with loading(name):
        return Path(snapshot_download(name, allow_patterns=list(files)))
