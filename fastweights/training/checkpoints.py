"""The checkpoints of trainings. Each appears whole or not at all and has checksums. A damaged one, or one of another run, is
never continued.

A recall run has one file, which the next checkpoint replaces. A language model has folders, and the older ones stay until a
newer one is complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..files import (
    CHECKSUMS,
    TENSOR_ERRORS,
    Own,
    WriteError,
    any_file,
    damage,
    is_own,
    list_own,
    remove_own,
    write_bytes,
    writing,
)
from ..layers import MixerChoice, in_block
from ..layers.choice import split_entry
from ..models.loading import SAVED_MODEL
from ..untrusted import check_file, read_json_object
from .folder import as_stored

__all__ = [
    "CHECKPOINT",
    "CheckpointError",
    "DamagedCheckpoint",
    "SaveError",
    "checkpoint_step",
    "checkpoints_in",
    "drop_old",
    "latest_whole",
    "load_checkpoint",
    "loading",
    "save_checkpoint",
    "saving",
]

_HEADER = b"fastweights checkpoint 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size

# What a training needs to continue.
PARTS = (("model*.safetensors",), ("optimizer*",), ("scheduler.pt",), ("rng_state*.pth",))

ARCHITECTURE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "mixer", "intermediate_size"),
    *("norm_eps", "tie_word_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "memory", "memory_rope", "memory_keys"),  # of hybrids
)
# Files of a checkpoint: those of the model, and what transformers' Trainer and accelerate write beside them.
SAVED_BY_TRAINER = (
    *("optimizer.pt", "optimizer.bin", "pytorch_model*.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("trainer_state.json", "open_loss.json", "data.json", CHECKSUMS),
)
CHECKPOINT: Own = {
    **SAVED_MODEL,
    "README.md": any_file,
    **dict.fromkeys(SAVED_BY_TRAINER, any_file),
    **dict.fromkeys(("pytorch_model_fsdp_*", "optimizer_*", "optimizer"), {"*": any_file}),
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used: truncated, altered, not a checkpoint, or of another run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not as it was written."""


class SaveError(WriteError):
    """A checkpoint or model could not be written; the earlier ones are whole."""


def save_checkpoint(path: Path, *, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain Python values) of the run described by `run`.

    The checksum is ours because torch's reader does not verify the one of the archive.
    """
    buffer = io.BytesIO()
    torch.save({"run": run, "state": state}, buffer)
    payload = buffer.getvalue()
    write_bytes(path, _HEADER + hashlib.sha256(payload).digest() + payload)


def load_checkpoint(path: Path, *, run: dict[str, Any]) -> dict[str, Any]:
    """The `state` that `save_checkpoint` wrote, with every tensor on the CPU.

    Raises:
        DamagedCheckpoint: the file is damaged, or is no checkpoint.
        CheckpointError: it belongs to a run other than `run`.
    """
    try:
        check_file(path, None)
    except ValueError as error:
        raise DamagedCheckpoint(f"checkpoint {error}; delete it to repeat this run from its start") from None
    content = path.read_bytes()
    digest, payload = content[len(_HEADER) :][:_DIGEST_SIZE], content[len(_HEADER) + _DIGEST_SIZE :]
    if not content.startswith(_HEADER) or hashlib.sha256(payload).digest() != digest:
        raise DamagedCheckpoint(
            f"checkpoint {path} is damaged (truncated or altered); delete that file to repeat this run from its start"
        )
    saved = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    if saved["run"] != run:
        fields = ", ".join(sorted(key for key in {*saved["run"], *run} if saved["run"].get(key) != run.get(key)))
        raise CheckpointError(
            f"checkpoint {path} belongs to another run (it differs in {fields}); "
            "delete that file to repeat this run from its start"
        )
    return saved["state"]


def checkpoint_step(checkpoint: Path) -> int:
    """The step that a checkpoint was made after."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the latest last. What a person had put in one that is gone is none."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted((path for path in found if not _is_left_over(path)), key=checkpoint_step)


def _is_left_over(path: Path) -> bool:
    return any(path.iterdir()) and not any(is_own(file, part) for file, part in list_own(path, CHECKPOINT))


def drop_old(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the latest `keep`. What a person has put in them stays."""
    for checkpoint in checkpoints_in(folder)[:-keep]:
        with suppress(OSError):
            remove_own(folder, {checkpoint.name: CHECKPOINT})


def latest_whole(folder: Path, config: Any, report: Callable[[str], None]) -> Path | None:
    """The latest checkpoint of a folder that is as it was written; None if there are no checkpoints.

    Damaged ones that are later get another name, and `report` is called with a line for each.

    Raises:
        CheckpointError: all checkpoints are damaged, or one is not of a model of this configuration. Nothing has changed.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints_in(folder)):
        why = _damage(checkpoint)
        if why is None:
            _check_architecture(checkpoint, config)
            break
        damaged[checkpoint] = why
    else:
        if not damaged:
            return None
        latest, why = next(iter(damaged.items()))
        others = f", and so are all before it in {folder}" if len(damaged) > 1 else ", and there is no other"
        raise DamagedCheckpoint(
            f"checkpoint {latest} is damaged ({why}){others}; put a copy in its place, or pass overwrite to train from the start"
        )
    for path, why in damaged.items():
        aside = path.with_name(f"damaged-{path.name}")
        remove_own(folder, {aside.name: CHECKPOINT})
        while os.path.lexists(aside):  # a person has put something there
            aside = aside.with_name(f"{aside.name}-more")
        path.rename(aside)
        report(f"checkpoint {path} is damaged ({why}): now {aside.name}; {checkpoint.name}, before it, is continued")
    return checkpoint


def _damage(checkpoint: Path) -> str | None:
    """Why a training cannot continue from a checkpoint, in words; None if it can. Those of earlier versions, whose moments are in
    one file, have no checksums."""
    why = damage(checkpoint) if (checkpoint / CHECKSUMS).exists() or (checkpoint / "optimizer").is_dir() else None
    if why is not None:
        return why
    try:
        for path in checkpoint.rglob("*"):
            if not path.is_dir():
                check_file(path, None)
        read_json_object(checkpoint / "config.json")
        from transformers import TrainerState  # here: recall needs none of transformers' training

        TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    except Exception as error:  # transformers raises what the values of the file cause
        return str(error)
    missing = [names for names in PARTS if not any(found for name in names for found in checkpoint.glob(name))]
    return f"it has no {' or '.join(missing[0])}" if missing else None


def _check_architecture(checkpoint: Path, config: Any) -> None:
    there, here = read_json_object(checkpoint / "config.json"), as_stored(config.to_dict())
    if _spelled_out(there.get("mixer")) == _spelled_out(here.get("mixer")):
        there["mixer"] = here.get("mixer")
    differences = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in ARCHITECTURE
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {checkpoint} is of another architecture: {', '.join(differences)}; choose another output folder, or "
            "pass overwrite to delete the trainings in this one"
        )


def _spelled_out(mixer: Any) -> Any:
    """The mixers of a configuration with the first values of the published block, which checkpoints of presets mean where they
    leave them out. They change nothing once there are weights."""
    try:
        entries = [split_entry(entry) for entry in (mixer if isinstance(mixer, list) else [mixer])]
        return [in_block(MixerChoice(name, options, name), "published", heads=1).entry for name, options in entries]
    except (KeyError, TypeError, ValueError):  # not of this library, or not registered
        return mixer


@contextmanager
def loading(checkpoint: str | Path) -> Iterator[None]:
    """Turns a failure to read into one clear error: torch, pickle, safetensors and transformers have no common kind."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # for a damaged file, torch's message advises to trust it
        why = type(error).__name__ if isinstance(error, UnpicklingError) else error
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint} is damaged ({why}); delete it to continue from an earlier one"
        ) from error


@contextmanager
def saving(what: str, partial: Path, folder: Path) -> Iterator[None]:
    """Turns a failure to write into one clear error, and deletes the incomplete files."""
    try:
        with writing(what, partial.parent, *TENSOR_ERRORS):
            yield
    except WriteError as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = checkpoints_in(folder)
        state = f"the last checkpoint, {kept[-1]}, is whole" if kept else "there is no earlier checkpoint"
        raise SaveError(f"{error}; {state}") from error
