"""Parameters whose first values are not those of an ordinary linear layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.authoring import Product, multiply_rows, takes_linear_rows
from .parts import HeadPart

__all__ = ["OwnInitialMatrices", "OwnInitialValues", "ResidualProjection", "UniformLinear", "inverse_softplus"]


def inverse_softplus(x: Tensor) -> Tensor:
    """The y with softplus(y) = x > 0."""
    return x + (-(-x).expm1()).log()


class ResidualProjection(nn.Linear):
    """A linear map whose result is added to the residual stream. A model with n of them draws their first weights smaller by
    sqrt(n), so that the stream's variance does not grow with depth (GPT-2). A bias is zero at first; only the first of several
    parts of a layer adds it."""

    part = HeadPart()

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        product = self.product()
        if type(self.weight) is nn.Parameter and takes_linear_rows(input, self.weight, product.bias):
            return multiply_rows(input, [product]).results[0]
        return F.linear(input, self.weight, product.bias)

    def product(self) -> Product:
        return Product(self.weight, bias=None if self.part.rank else self.bias)


class OwnInitialValues(nn.Module):
    """A module that defines the first values of its own parameters. Its submodules define theirs.

    The values are computed without writing the parameters. A model that loads a checkpoint can so write only the values that
    the checkpoint lacks.

    Attributes:
        _no_weight_decay: names of own parameters that weight decay must leave alone, such as the logarithm of a rate, whose 0
            is a rate of 1. Each has the mark `_no_weight_decay = True`, Mamba's convention. Another tensor that takes its place
            gets the mark too.
    """

    _no_weight_decay: ClassVar[tuple[str, ...]] = ()

    def initial_values(self) -> dict[str, Tensor]:
        """First value of each parameter by name, drawn from torch's generator, on the device of the parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, value in self.initial_values().items():
            self.get_parameter(name).copy_(value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parameters()  # a copied parameter has lost it

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        applied = super()._apply(*args, **kwargs)
        self._mark_parameters()
        return applied

    def _mark_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name in self._no_weight_decay:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]


class OwnInitialMatrices(OwnInitialValues):
    """A module that defines first values and also has matrices, which are drawn like all other matrices of a model."""

    def initial_values(self, std: float = 0.02) -> dict[str, Tensor]:
        """std: standard deviation of the matrices, a model's initializer_range."""
        raise NotImplementedError


class UniformLinear(OwnInitialValues, nn.Linear):
    """A linear map without bias. Its first weights are uniform in +-1/sqrt(inputs), torch's own, also inside a model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        weight = torch.empty_like(self.weight, dtype=torch.float32)
        return {"weight": weight.uniform_(-(self.in_features**-0.5), self.in_features**-0.5)}
