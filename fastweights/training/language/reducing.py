"""DDP that adds up gradients in bfloat16: half the bytes of float32."""

import torch
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["reduce_in_bfloat16"]


def reduce_in_bfloat16(model: torch.nn.Module) -> None:
    """Before the first step. A model of a single process, which is not wrapped by DDP, stays as it is."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(model.process_group, _reduce)


# DDP reads the annotations. It refuses torch's hook by its name without NCCL, although gloo adds up bfloat16 too.
def _reduce(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return bf16_compress_hook(group, bucket)
