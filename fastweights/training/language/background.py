"""Checkpoints that are written in the background, while the training goes on."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...files import publish_folder
from ...private_torch import keep_staging
from ..checkpoints import CHECKPOINT, SaveError, checkpoint_step, checkpoints_in, drop_old, saving
from .processes import largest_of_processes, new_cpu_group
from .sharded_checkpoints import ShardWriter, first_failure, tensors_to_write

__all__ = ["BackgroundCheckpoints"]


class BackgroundCheckpoints(TrainerCallback):
    """Writes checkpoints one at a time. A context manager around a training, at whose end the last one is complete.

    The training waits while each process copies its part of weights and moments to main memory. A thread per process then writes
    and hashes that part; when all have, that of the main process renames the folder. The threads agree by a group of their own.

    Args:
        folder: where checkpoints go.
        keep: how many are kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._stager = _Stager()
        self._writing: Future[Any] | None = None
        self._made = folder  # that of the checkpoint which is being written
        self._threads: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._threads = new_cpu_group()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A failed write ends the training after the same step in every process."""
        if self._writing is not None and not largest_of_processes(not self._writing.done()):
            self.finish()

    def begin(self, made: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to add the tensors to the folder `made`, which has all other files of a checkpoint and is then published.

        Raises:
            SaveError: their copies could not be made.
        """
        ranks = torch.distributed
        rank, size = (0, 1) if self._threads is None else (ranks.get_rank(), ranks.get_world_size())
        self._made = made
        with self._saving():
            self._writing = dcp.async_save(  # type: ignore[assignment]  # the kind of future that this stager leads to
                tensors_to_write(model, optimizer, rank=rank, size=size),
                storage_writer=ShardWriter(made, rank, size, self._publish),
                process_group=self._threads,
                async_stager=self._stager,
            )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            SaveError: it could not be written.
        """
        if self._writing is not None:
            wait([self._writing])
            writing, self._writing = self._writing, None
            self._stager.release()
            with self._saving(), first_failure():
                writing.result()

    def complete(self) -> list[Path]:
        """All checkpoints that there are, the one included that is being written."""
        self.finish()
        return checkpoints_in(self._folder)

    def _saving(self) -> Any:
        return saving(f"the checkpoint of step {checkpoint_step(self._made)}", self._made.parent, self._folder)

    def _publish(self) -> None:
        publish_folder(self._made, self._folder / self._made.name, CHECKPOINT)
        self._made.parent.rmdir()
        drop_old(self._folder, self._keep)

    def __enter__(self) -> BackgroundCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.finish()
        except SaveError:
            if kind is None:
                raise
        finally:
            self._stager.close()


class _Stager(DefaultStager):
    """Copies to main memory, pinned where there is a GPU, which is used again for the next checkpoint.

    DCP frees what it does not use again in the thread that writes. Memory of a GPU's driver is freed in `release` instead:
    no CUDA graph is captured then."""

    def __init__(self) -> None:
        gpu = torch.cuda.is_available()
        super().__init__(
            StagingOptions(gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu)
        )
        self._staged: Any = None
        self._close_copier = keep_staging(self)

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        self._staged = super().stage(state_dict, **kwargs)
        return self._staged

    def release(self) -> None:
        self._staged = None

    def close(self) -> None:
        super().close()
        self._close_copier()
