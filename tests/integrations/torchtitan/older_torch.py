"""What torchtitan 0.3.0 takes from torch, for older ones: two names, which torch has from 2.14 and 2.12 on, and FSDP2 of modules
of one group that are called apart.

The first name shortens timeouts after the first step. The second belongs to backends that models of fastweights do not use. The
chunked loss calls the output layer by itself, but torchtitan shards it in one group with the last norm: torch 2.11 then frees
parameters that a backward still reads. There each module of a group gets a group of its own, with the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn

if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group=None: None
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    together = torch.distributed.fsdp.fully_shard

    def fully_shard(modules: nn.Module | list[nn.Module], **settings: Any) -> None:
        for module in modules if isinstance(modules, list) else [modules]:
            together(module, **settings)

    torch.distributed.fsdp.fully_shard = fully_shard
