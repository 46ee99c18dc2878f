"""Distils as a run file says, in processes without GPUs that share the parameters (FSDP2)."""

import sys

from accelerate import PartialState

from fastweights.distillation import DistillRun, distill
from fastweights.training.language import load_run
from tests.training.language.fsdp_on_cpu import shard_on_cpu

if __name__ == "__main__":
    shard_on_cpu()
    run = load_run(sys.argv[1], kind=DistillRun)
    assert distill(run, stop_at=4) is None
    distill(run)
    PartialState().destroy_process_group()
