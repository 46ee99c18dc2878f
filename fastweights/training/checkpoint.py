"""Checkpoints of a training run: one file, written atomically, with a checksum over all that it holds."""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from ..files import write_bytes
from ..untrusted import check_file

__all__ = ["CheckpointError", "DamagedCheckpoint", "load_checkpoint", "save_checkpoint"]

_HEADER = b"fastweights checkpoint 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size


class CheckpointError(ValueError):
    """A checkpoint cannot be used: truncated, altered, not a checkpoint, or of another run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not as it was written."""


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
