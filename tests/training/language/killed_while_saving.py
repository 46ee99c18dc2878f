"""Trains a run file sharded, as fsdp_on_cpu.py, and dies while it saves the second checkpoint since its start, at the place of a
number."""

import os
import signal
import sys

from fsdp_on_cpu import shard_on_cpu

from fastweights.training.language import background, load_run, sharded_checkpoints, train_language


def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(tensors, path, **kwargs):
    path.write_bytes(b"half of the tensors")
    kill()


def renamed(*args, publish_folder=background.publish_folder):
    publish_folder(*args)
    kill()


# Rank, place, its calls per checkpoint, and what happens there: while tensors are copied, while they are written, when all are
# written, and when the folder has its name.
DEATHS = [
    (1, background._Stager, "stage", 1, kill),
    (1, sharded_checkpoints, "save_file", 2, half_written),
    (0, background, "publish_folder", 1, kill),
    (0, background, "publish_folder", 1, renamed),
]


def die_at(owner, name, per_checkpoint, death):
    work, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        return (death if len(calls) > per_checkpoint else work)(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    shard_on_cpu()
    rank, *death = DEATHS[int(sys.argv[2])]
    if rank == int(os.environ["RANK"]):
        die_at(*death)
    train_language(load_run(sys.argv[1]))
