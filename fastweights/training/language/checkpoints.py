"""Checkpoints on disk. Each appears whole or not at all, and older ones stay until a newer one is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError
from transformers import TrainerState

from ...models import FastWeightsConfig
from ..output_folder import as_stored

__all__ = ["SaveError", "check_checkpoint", "checkpoint_step", "checkpoints_in", "drop_old", "loading", "saving"]

# The files that a training needs to continue, and FSDP's names for them. transformers would continue without some.
PARTS = (("model*.safetensors", "pytorch_model_fsdp*"), ("optimizer*",), ("scheduler.pt",), ("rng_state*.pth",))

ARCHITECTURE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "mixer", "intermediate_size"),
    *("norm_eps", "tie_word_embeddings"),
)


class SaveError(OSError):
    """A checkpoint or model could not be written; the earlier ones are whole."""


def checkpoint_step(checkpoint: Path) -> int:
    """The step that a checkpoint was made after."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the latest last."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=checkpoint_step)


def drop_old(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the latest `keep`."""
    for checkpoint in checkpoints_in(folder)[:-keep]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def check_checkpoint(checkpoint: Path, config: FastWeightsConfig) -> None:
    """ValueError unless the checkpoint has a model of this configuration and all files that a training needs to continue."""
    remedy = "choose another output folder, or pass overwrite to delete the trainings in this one"
    with loading(checkpoint):
        there = dict(json.loads((checkpoint / "config.json").read_bytes()))
        TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        for names in PARTS:
            if not any(found for name in names for found in checkpoint.glob(name)):
                raise FileNotFoundError(f"it has no {' or '.join(names)}")
    here = as_stored(config.to_dict())
    differences = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in ARCHITECTURE
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise ValueError(f"checkpoint {checkpoint} is of another architecture: {', '.join(differences)}; {remedy}")


@contextmanager
def loading(checkpoint: str | Path) -> Iterator[None]:
    """Turns a failure to read into one clear error: torch, pickle, safetensors and transformers have no common kind."""
    try:
        yield
    except Exception as error:
        # for a damaged file, torch's message advises to trust it
        why = type(error).__name__ if isinstance(error, UnpicklingError) else error
        raise ValueError(
            f"checkpoint {checkpoint} is damaged ({why}); delete it to continue from an earlier one"
        ) from error


@contextmanager
def saving(what: str, partial: Path, folder: Path) -> Iterator[None]:
    """Turns a failure to write into one clear error, and deletes the incomplete files.

    torch and safetensors have error types of their own for a disk that is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = checkpoints_in(folder)
        state = f"the last checkpoint, {kept[-1]}, is whole" if kept else "there is no earlier checkpoint"
        raise SaveError(f"{what} could not be saved to {partial.parent}: {error}; {state}") from error
