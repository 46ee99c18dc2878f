"""From a pretrained Transformer to a folder with its hybrid: memories in place of attention, tokenizer, and the run file by which
it learns from its teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.text.tokenizer import fingerprint
from ..files import TENSOR_ERRORS, staged_folder, write_bytes, write_json, writing
from ..kinds import checked
from ..layers.projections import OutputProjection, ShortConvolution
from ..models.card import write_card
from ..models.hybrid import FAMILIES, linearize
from ..models.hybrid.linearize import OPEN, hybrid_settings
from ..models.loading import empty_model, load_config, load_tokenizer
from ..outputs import listed_files
from .convert import LogitsCheck, compute_logits
from .folder import (
    DESCRIPTION,
    check_arguments,
    check_output,
    choose_tokens,
    claim_output,
    copy_tokenizer,
    load_model,
)
from .training import distillation_file, recorded_training

__all__ = ["LinearizationReport", "linearize_folder", "plan_linearization"]

RUN_FILE = "distill.toml"
LENGTHS = (2_048, 65_536)  # tokens for which the sizes of caches are told


@checked
@dataclass(frozen=True, kw_only=True)
class LinearizationReport:
    """What became of a pretrained Transformer.

    Attributes:
        to: the mixer of the memories.
        converted, kept: layers with a memory, and with attention.
        parameters: how many numbers the hybrid has; new_parameters: how many more than the teacher.
        state: by the number of tokens, how many numbers the caches of hybrid and teacher hold per sequence.
        first_values: what the memories begin with, in words.
        check: the comparison of the logits of both.
        tokenizer: names of the files copied.
        output: the folder of the hybrid.
    """

    to: str
    converted: tuple[int, ...]
    kept: tuple[int, ...]
    parameters: int
    new_parameters: int
    state: Mapping[int, tuple[int, int]]
    first_values: list[str]
    check: LogitsCheck
    tokenizer: list[str]
    output: Path


@checked
def linearize_folder(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    keep: str | Iterable[int] = "none",
    keys: str = "shared",
    rope: bool = True,
    prompt: str | None = None,
    tokens: int = 256,
    seed: int = 0,
    steps: int = 2000,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    selection: Mapping[str, int] | None = None,
) -> LinearizationReport:
    """`linearize` the model `source` (a folder or a name on the hub) of a type in `FAMILIES`, and save the hybrid in the folder
    `output`, with the tokenizer and a run file for `fastweights distill`.

    Logits are compared in float32, and the hybrid is saved in the dtype that the source is stored in. The output appears when
    everything is written, or not at all.

    Args:
        output: must not exist, or be empty, or be an earlier conversion with `overwrite`.
        to, keep, keys, rope, seed, options: as for `linearize`.
        prompt: text on which the logits of both models are compared; random tokens when None.
        tokens: how many of these.
        steps: of each stage in the run file.
        overwrite: replace an earlier conversion in the output folder. Files that are not as it wrote them are refused.
        selection: the table [selection] of the run file: the budget of the ranking that chose `keep`.

    Raises:
        ValueError: what `linearize` refuses; a source that is missing, damaged or of another type; an output that is not empty,
            cannot be made, is in use by another process or to which a link leads; logits that are not finite.
        WriteError: the output could not be written, as where the disk is full. There is none then.
    """
    source, output = check_arguments(
        source, output, overwrite=overwrite, prompt=prompt, tokens=tokens, seed=seed, steps=steps
    )
    choices: dict[str, Any] = {"to": to, "keep": keep, "keys": keys, "rope": rope}
    with claim_output(source, output, overwrite, FAMILIES) as (own, folder_of_source):
        training = recorded_training(folder_of_source, output)
        config = hybrid_settings(load_config(folder_of_source), **choices, options=options or {})
        empty_model(config)  # refuses options that do not fit, before the weights are read
        teacher, stored = load_model(folder_of_source)
        hybrid: Any = linearize(teacher, **choices, seed=seed, **(options or {}))
        hybrid.config.teacher = Path(source).resolve().name if Path(source).is_dir() else source
        check = _compare(teacher, hybrid, choose_tokens(folder_of_source, teacher, prompt, tokens))
        report = {**_count(hybrid), "first_values": describe_first_values(hybrid), "check": check}
        with writing("the converted model", output, *TENSOR_ERRORS), staged_folder(output, own or None) as folder:
            hybrid.to(stored).save_pretrained(folder)
            tokenizer = _copy_tokenizer(folder_of_source, folder)
            write_card(folder, hybrid, {"Converted from": Path(source).name, "Memories": to, "Trained since": "no"})
            settings = distillation_file(
                output,
                teacher=folder_of_source,
                training=training,
                steps=steps,
                tokenizer=bool(tokenizer),
                selection=selection,
            )
            write_bytes(folder / RUN_FILE, settings.encode())
            facts = {"from": source, **choices, "keep": report["kept"], "seed": seed, **asdict(check)}
            write_json(folder / DESCRIPTION, {**facts, "files": listed_files(folder)})
        return LinearizationReport(to=to, tokenizer=tokenizer, output=output, **report)


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the teacher's tokenizer; names of its files. transformers chooses some classes by the model type in config.json: where
    the same files make another tokenizer beside the hybrid, the teacher's is saved anew."""
    names = copy_tokenizer(source, folder)
    if not names:
        return names
    with suppress(ValueError):  # of one that is damaged or needs its own code, the copy is all there is
        tokenizer = load_tokenizer(source)
        if fingerprint(load_tokenizer(folder)) != fingerprint(tokenizer):
            for name in names:
                (folder / name).unlink()
            saved = {Path(file) for file in tokenizer.save_pretrained(folder)}
            names = sorted(file.name for file in saved if file.is_file())
    return names


def plan_linearization(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    keep: str | Iterable[int] = "none",
    keys: str = "shared",
    rope: bool = True,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """What `linearize_folder` would make of the same arguments. Weights are not read, and nothing is written.

    Raises:
        ValueError: as `linearize_folder`, but for damaged weights.
    """
    source, output = check_arguments(source, output, overwrite=overwrite, **others)
    folder = check_output(source, output, overwrite, FAMILIES)
    recorded_training(folder, output)
    config = hybrid_settings(load_config(folder), to=to, keep=keep, keys=keys, rope=rope, options=options or {})
    counts = _count(empty_model(config))
    sizes = {
        f"numbers in the cache after {length:,} tokens, hybrid and teacher": list(pair)
        for length, pair in counts["state"].items()
    }
    return {
        "source": source, "memory": to, "layers with a memory": list(counts["converted"]),
        "layers with attention": list(counts["kept"]), "parameters": counts["parameters"],
        "new parameters": counts["new_parameters"], **sizes, "output": str(output), "run file": str(output / RUN_FILE),
    }  # fmt: skip


def _count(hybrid: Any) -> dict[str, Any]:
    """Layers, parameters and sizes of caches of a hybrid and of its teacher, which is a hybrid that keeps all attention."""
    config = type(hybrid.config).from_dict({**hybrid.config.to_dict(), "memory": None, "memory_keys": "shared"})
    teacher: Any = empty_model(config)
    converted = tuple(hybrid.memory_layers())
    parameters = hybrid.num_parameters()
    return {
        "converted": converted,
        "kept": tuple(layer for layer in range(config.num_hidden_layers) if layer not in converted),
        "parameters": parameters,
        "new_parameters": parameters - teacher.num_parameters(),
        "state": {length: (hybrid.state_size(length), teacher.state_size(length)) for length in LENGTHS},
    }


@torch.no_grad()
def _compare(teacher: Any, hybrid: Any, tokens_BT: torch.Tensor) -> LogitsCheck:
    expected = compute_logits(teacher, tokens_BT)
    difference = (compute_logits(hybrid, tokens_BT) - expected).abs().max().item()
    check = LogitsCheck(
        tokens=tokens_BT.numel(),
        largest_logit=expected.abs().max().item(),
        neutral=None if hybrid.memory_layers() else difference,
        saved=difference,
    )
    check.insist()
    return check


def describe_first_values(hybrid: Any) -> list[str]:
    """What the memories of a hybrid that `linearize` has made begin with."""
    layer: Any = next(iter(hybrid.memory_layers().values()), None)
    if layer is None:
        return []
    repeated = hybrid.config.memory_keys == "repeated"
    parts = list(layer.memory.modules())
    gated = any(isinstance(part, OutputProjection) and part.gate == "sigmoid" for part in parts)
    lines = [
        "projections of q, k, v and of the output, and norms of q and k: the attention's"
        + (", those of keys and values once per query head" if repeated else ""),
        f"q and k: {'rotated as in the attention' if hybrid.config.memory_rope else 'not rotated'}",
    ]
    if any(isinstance(part, ShortConvolution) for part in parts):
        lines.append("short convolutions: the identity")
    if gated:
        lines.append(f"output gate: {OPEN} everywhere, and weights {1 / OPEN:g} in the norm before it")
    if sum(parameter.numel() for parameter in layer.memory.parameters()):
        lines.append("all else: as in a new layer of its published block")
    return lines
