"""Trains a run file in processes without GPUs, sharded or not: to a step, where one is named, and on from its checkpoint, where
"stop" is not said. Where "replayed" is, steps are replayed, and the script says how many were captured.

accelerate shards (FSDP2) on accelerators only. torch itself can shard on the CPU, over gloo, so this script makes accelerate
try. The tests of it cover our own part: optimizer groups, held-out loss, checkpoints and the saved model.
"""

import sys
from collections import defaultdict
from contextlib import nullcontext

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from fastweights.models import loss, modeling
from fastweights.training.language import graphs, load_run, planning, train_language, trainer
from tests.training.language.replayed import Replayed

initialize = AcceleratorState.__init__


def initialize_sharded(self, *args, fsdp_plugin=None, **options):
    initialize(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def watched():
    """The dtypes of what a sharded model computes, as sets that grow; and in their order, as a list of letters that grows, its
    gathers (g), calls of a block (b) and losses (l)."""
    chunked, forward, dtypes, order = loss.causal_lm_loss, modeling.FastWeightsBlock.forward, defaultdict(set), []
    gather = DefaultAllGather.__call__

    def watched_loss(*args):
        loss = chunked(*args)
        dtypes["loss"].add(loss.dtype)
        order.append("l")
        return loss

    def watched_gather(*args, **kwargs):
        order.append("g")
        return gather(*args, **kwargs)

    def watched_forward(self, x, *args, **kwargs):
        order.append("b")
        if isinstance(self, FSDPModule):
            dtypes["stream"].add(x.dtype)
            dtypes["weights"].add(next(self.parameters()).dtype)
        return forward(self, x, *args, **kwargs)

    def watched_shard(*args, mp_policy, **kwargs):
        dtypes["sums of gradients"].add(mp_policy.reduce_dtype)
        return shard(*args, mp_policy=mp_policy, **kwargs)

    loss.causal_lm_loss, modeling.FastWeightsBlock.forward = watched_loss, watched_forward
    DefaultAllGather.__call__ = watched_gather
    shard, fsdp.fully_shard = fsdp.fully_shard, watched_shard
    return dtypes, order


def replay_on_cpu():
    """The steps that are captured, as a list that grows."""
    made = []

    def captured(work, device):
        trained = work.func.__self__.model  # of the trainer whose method is captured
        made.append(Replayed(work, [parameter for parameter in trained.parameters() if parameter.requires_grad]))
        return made[-1], made[-1].loss

    graphs.captured, graphs.refusing_waits = captured, torch.enable_grad
    trainer.what_to_graph, trainer.capturing_stream = lambda run: True, nullcontext
    return made


def shard_on_cpu():
    AcceleratorState.__init__ = initialize_sharded
    planning._check_device = lambda *arguments: None  # which refuses exactly this


if __name__ == "__main__":
    shard_on_cpu()
    run = load_run(sys.argv[1])
    replays = replay_on_cpu() if "replayed" in sys.argv else []
    dtypes, order = ({}, []) if run.compile else watched()
    for step in sys.argv[2:3]:
        assert train_language(run, stop_at=int(step)) is None
    if "stop" not in sys.argv:
        train_language(run)
    PartialState().destroy_process_group()
    print("order:", "".join(order), file=sys.stderr)
    print("captured:", len(replays), file=sys.stderr)
    wanted = {
        **dict.fromkeys(("loss", "stream"), {torch.float32}), "weights": {torch.bfloat16},
        "sums of gradients": {getattr(torch, run.reduce_dtype)},
    }  # fmt: skip
    assert not run.fsdp or run.precision != "bf16" or dtypes == wanted, dtypes
