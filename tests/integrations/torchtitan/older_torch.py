"""Two names that torchtitan 0.3.0 takes from torch, which has them from 2.14 and 2.12 on.

The first shortens timeouts after the first step. The second belongs to backends that models of fastweights do not use.
"""

from __future__ import annotations

import torch
import torch.distributed.fsdp

if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group=None: None
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
