"""Trains a run file sharded, as fsdp_on_cpu.py, and dies while it saves the second checkpoint since its start: at another place
each time that torchrun starts it again, until it has died at all of them. Every start is noted in a file."""

import os
import signal
import sys
from pathlib import Path

from fsdp_on_cpu import shard_on_cpu

from fastweights import files
from fastweights.training.checkpoints import checkpoint_step, checkpoints_in
from fastweights.training.language import background, load_run, sharded_checkpoints, train_language


def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(tensors, path, **kwargs):
    path.write_bytes(b"half of the tensors")
    kill()


def rename_and_kill(old, new):
    os.replace(old, new)
    kill()


# Rank, place and what happens there in the second checkpoint, by the number of the start.
DEATHS = [
    (1, background, "tensors_to_write", kill),
    (0, background._Stager, "stage", kill),
    (1, sharded_checkpoints, "save_file", half_written),
    (0, sharded_checkpoints, "write_checksums", kill),
    (0, background, "publish_folder", kill),
    (0, files.os, "rename", rename_and_kill),
    (0, background, "drop_old", kill),
]
CALLS = {"save_file": 2}  # per checkpoint: weights and moments


def die_at(owner, name, death):
    work, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        return (death if len(calls) > CALLS.get(name, 1) else work)(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    shard_on_cpu()
    run, start = load_run(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    if rank == 0:
        steps = [checkpoint_step(path) for path in checkpoints_in(Path(run.output, "checkpoints"))]
        with open(sys.argv[2], "a") as noted:
            noted.write(f"{max(steps, default=0)}\n")
    for number, (who, *death) in enumerate(DEATHS):
        if (number, who) == (start, rank):
            die_at(*death)
    train_language(run)
