"""What stands for a CUDA graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replayed:
    """In the place of a CUDA graph: work that is done again, into the tensors of its capture."""

    def __init__(self, work: Callable[[], torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
        self.work, self.parameters = work, parameters
        self.loss = work()
        self.gradients = [parameter.grad for parameter in parameters]
        for x in (self.loss, *self.gradients):
            assert x is not None
            x.fill_(float("nan"))  # a capture runs nothing

    def replay(self) -> None:
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.loss.copy_(self.work())
        for parameter, fixed, grad in zip(self.parameters, self.gradients, before, strict=True):
            fixed.copy_(parameter.grad)
            parameter.grad = grad
