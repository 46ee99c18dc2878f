"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replayed:
    """In the place of a CUDA graph: work that is done again, on the tensors of its capture."""

    def __init__(self, work: Callable[[], torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
        self.work, self.parameters = work, parameters
        self.adds = parameters[0].grad is not None  # to the gradients that there are at its capture
        before = [(parameter.grad, parameter.grad.clone()) for parameter in parameters] if self.adds else []
        self.loss = work()
        self.gradients = [parameter.grad for parameter in parameters]
        for x in (self.loss, *self.gradients):
            assert x is not None
            x.fill_(float("nan"))  # a capture runs nothing
        for (x, value), gradient in zip(before, self.gradients, strict=False):
            assert x is gradient
            x.copy_(value)

    def replay(self) -> None:
        before = [parameter.grad for parameter in self.parameters]
        for parameter, fixed in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = fixed if self.adds else None
        self.loss.copy_(self.work())
        for parameter, fixed, grad in zip(self.parameters, self.gradients, before, strict=True):
            if not self.adds:
                fixed.copy_(parameter.grad)
            parameter.grad = grad
