"""How much memory a piece of work takes on a CPU."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive."""

    now = most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return result

    def __enter__(self):
        self.seen = set()
        return super().__enter__()

    def freed(self, key, size):
        self.seen.discard(key)
        self.now -= size


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that anything computes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return results
