"""Distils as a run file says, in processes without GPUs that share the parameters (FSDP2). Where "replayed" is named too, steps
are replayed."""

import sys

from accelerate import PartialState
from torch.distributed.tensor import DTensor

from fastweights.distillation import DistillRun, distill, trainer
from fastweights.distillation.teacher import teacher_blocks
from fastweights.training.language import load_run
from tests.training.language.fsdp_on_cpu import replay_on_cpu, shard_on_cpu

make_teacher = trainer.make_teacher


def make_shared(*arguments):
    teacher = make_teacher(*arguments)
    parts = [p for block in teacher_blocks(teacher.model) for p in block.parameters()]
    assert parts and all(isinstance(p, DTensor) for p in parts)
    return teacher


if __name__ == "__main__":
    shard_on_cpu()
    trainer.make_teacher = make_shared
    replays = replay_on_cpu() if "replayed" in sys.argv else None
    run = load_run(sys.argv[1], kind=DistillRun)
    assert distill(run, stop_at=4) is None
    distill(run)
    PartialState().destroy_process_group()
    assert replays != []
