"""Several products of one input.

On the few rows of a decoding step one launch serves all linear modules that multiply the norm of the residual stream, with the
norm and what follows each product (`normalize_for`). A module that multiplies its input has a method `input_products`, which
names its linear modules and what follows them. The results wait at the norm until the module asks for them (`multiply`).

In training the matrix products of the backward add up the gradients of the input, which nothing else has to. The projections of
gates are one product on a GPU: with the few columns of a gate a product takes as long as reading x, writing its gradient or
reading it for the weights, and with one in place of two to four that happens once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..ops.authoring import (
    Normed,
    Product,
    joined_product,
    linear_rows,
    multiply_rows,
    product_dtype,
    takes_linear_rows,
)
from .initialization import ResidualProjection, UniformLinear
from .norms import GatedRMSNorm, GroupedRMSNorm, HeadsLayerNorm, LayerNorm, RMSNorm, normalize_sum
from .wrapped import is_bare, is_unhooked

__all__ = [
    "InputProducts",
    "Products",
    "ProjectedGate",
    "arrange_rows",
    "find_first_part",
    "first_products",
    "compute_gates",
    "is_plain",
    "joins",
    "joins_norm",
    "multiply",
    "normalize_for",
    "plain_products",
    "project",
    "project_together",
    "multiply_one_input",
    "project_jointly",
    "project_trained",
    "sums_gradients",
    "trains_jointly",
    "trains_on_gpu",
]

PLAIN = (nn.Linear, ResidualProjection, UniformLinear)
WIDEST_ROW = 4096  # that a norm keeps in registers
InputProducts: TypeAlias = "list[tuple[nn.Module, Product]]"
Products: TypeAlias = "dict[nn.Module, Tensor | None]"  # of one input, by the module; None where it is not there


def trains_on_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU and needs a gradient."""
    return x.is_cuda and x.requires_grad and torch.is_grad_enabled()


def sums_gradients(x: Tensor) -> bool:
    """Whether `multiply_one_input` pays: eagerly on a GPU, for gradients. A compiler joins the sums with what follows."""
    return trains_on_gpu(x) and not torch.compiler.is_compiling()


def trains_jointly(x: Tensor, *modules: Any) -> bool:
    """Whether `project_jointly` may take the place of the modules' calls on x, for gradients on a GPU."""
    if not (trains_on_gpu(x) and all(map(is_plain, modules))):
        return False
    first = modules[0].weight
    if not (x.dtype == first.dtype or torch.is_autocast_enabled(x.device.type)):  # which a module's call refuses
        return False
    return all(
        one.bias is None and one.weight.dtype == first.dtype and one.weight.requires_grad == first.requires_grad
        for one in modules
    )


def project_jointly(x: Tensor, *modules: Any, multiple: int = 1) -> Tensor:
    """What linear modules give for x, side by side, filled up with zeros to a multiple of columns."""
    return joined_product(x, *(one.weight for one in modules), multiple=multiple)


def project_trained(x: Tensor, module: Any) -> Tensor:
    """What a module gives for x. In training on a GPU the gradient of a linear module's weight is not rounded to 16 bits."""
    return project_jointly(x, module) if trains_jointly(x, module) and module.weight.requires_grad else module(x)


def multiply_one_input(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x [..., D] times each of the weights [E, D], transposed, in autocast's dtype where it is on. No second derivatives."""
    dtype = product_dtype(x)
    return _Products.apply(x.to(dtype), dtype, *weights)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        weights = tuple(weight.to(dtype) for weight in weights)
        ctx.save_for_backward(x, *weights)
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = x.flatten(0, -2)
        of_x = None
        of_weights: list[Tensor | None] = []
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            rows = gradient.flatten(0, -2)
            of_x = rows @ weight if of_x is None else of_x.addmm_(rows, weight)
            wanted = ctx.needs_input_grad[2 + number]
            of_weights.append((rows.mT @ flat).to(ctx.dtypes[number]) if wanted else None)
        return None if of_x is None else of_x.view_as(x), None, *of_weights


def is_plain(module: nn.Module) -> bool:
    """Whether the module does nothing but multiply with its weight: adapters, quantised layers and hooks do more."""
    return is_bare(module, *PLAIN) and type(module.weight) is nn.Parameter


def joins(x: Tensor, *modules: Any, backend: str = "auto") -> bool:
    """Whether `linear_rows` may take the place of the modules' calls on x."""
    if not all(map(is_plain, modules)):
        return False
    parameters = [given for one in modules for given in (one.weight, one.bias)]
    return takes_linear_rows(x, *parameters, backend=backend)


def normalize_for(
    reader: nn.Module, norm: RMSNorm | LayerNorm, x: Tensor, branch: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`normalize_sum` for a module that reads the norm. For few rows the launch of the norm computes its products too."""
    if not (is_bare(norm, RMSNorm) and x.shape[-1] <= WIDEST_ROW and takes_linear_rows(x, norm.weight)):
        return normalize_sum(norm, x, branch)
    found: dict[nn.Module, Product] = {}
    for module, product in _input_products(reader):
        if joins(x, module) and takes_linear_rows(x, product.more):
            found.setdefault(module, product)  # a gate comes before the gates within it
    if not found or (branch is not None and branch.dtype != x.dtype):
        return normalize_sum(norm, x, branch)
    made = multiply_rows(x, [*found.values()], Normed(norm.weight, norm.eps, branch))
    assert made.n is not None
    made.n._products = dict(zip(found, made.results))  # type: ignore[attr-defined]
    return x if made.s is None else made.s, made.n


def _input_products(reader: nn.Module) -> Iterable[tuple[nn.Module, Product]]:
    for module in reader.modules():
        find: Any = getattr(module, "input_products", None)
        if find is not None:
            yield from find()


def multiply(x: Tensor, module: nn.Module, product: Product) -> Tensor:
    """The product of x with the weight of a module that `joins`, which may be there already."""
    ready = getattr(x, "_products", {}).get(module)
    return multiply_rows(x, [product]).results[0] if ready is None else ready


def arrange_rows(x: Tensor, *lead: int) -> Tensor:
    """The rows of x [..., D] as [*lead, D], with the products that are there."""
    arranged = x.reshape(*lead, -1)
    ready: Products = getattr(x, "_products", {})
    arranged._products = {  # type: ignore[attr-defined]
        module: made if made is None else made.reshape(*lead, -1) for module, made in ready.items()
    }
    return arranged


def joins_norm(
    x: Tensor, norm: RMSNorm | LayerNorm, projection: nn.Module, *others: Tensor | None, backend: str = "auto"
) -> bool:
    """Whether the norm of x, of which others are a part, may be computed by the launch of the projection."""
    return (
        is_bare(norm, GatedRMSNorm, GroupedRMSNorm, HeadsLayerNorm)
        and not norm.is_divided
        and x.shape[-1] <= WIDEST_ROW
        and joins(x, projection, backend=backend)
        and takes_linear_rows(x, norm.weight, getattr(norm, "bias", None), *others, backend=backend)
    )


def plain_products(*modules: Any) -> InputProducts:
    """`input_products` of linear modules, or of the first in each of several rows of them, with nothing that follows."""
    firsts: list[Any] = [find_first_part(one) if isinstance(one, nn.Sequential) else one for one in modules]
    return [(one, Product(one.weight, bias=one.bias)) for one in firsts if one is not None and is_plain(one)]


def project_together(x: Tensor, *modules: Any, backend: str = "auto") -> list[Tensor]:
    """What each of several modules gives for x: by one kernel for few rows, with one gradient of x in training."""
    if all(map(is_plain, modules)) and all(module.bias is None for module in modules):
        weights = [module.weight for module in modules]
        if takes_linear_rows(x, *weights, backend=backend):
            ready = getattr(x, "_products", {})
            if all(module in ready for module in modules):
                return [ready[module] for module in modules]
            return linear_rows(x, *weights)
        if sums_gradients(x):
            return list(multiply_one_input(x, *weights))
    return [module(x) for module in modules]


def project(x: Tensor, module: Any) -> Tensor:
    """What a module gives for x. For few rows a kernel takes the place of a linear module, and of each of several in a row."""
    if is_bare(module, nn.Sequential):
        for part in module:
            x = project(x, part)
        return x
    return multiply(x, module, Product(module.weight, bias=module.bias)) if joins(x, module) else module(x)


def find_first_part(projection: Any) -> nn.Module | None:
    """The first part of a projection in two; None where its parts must not be called one by one, past hooks or an adapter."""
    return projection[0] if is_bare(projection, nn.Sequential) else None


class ProjectedGate(nn.Module):
    """A gate that multiplies its input with a weight first (`projection`) and computes the rest from the product (`finish`)."""

    @property
    def projection(self) -> nn.Module | None:
        """None where the input must not be projected apart from the gate."""
        raise NotImplementedError

    def finish(self, y: Tensor) -> Tensor:
        """The gate, given projection(x)."""
        raise NotImplementedError


def compute_gates(x: Tensor, *gates: nn.Module | None, products: Products | None = None) -> list[Any]:
    """What each gate gives for x [B, T, D]; None for a gate that is None. products: those of x that are there already."""
    joined: list[ProjectedGate] = []
    if trains_on_gpu(x):
        joined = [gate for gate in gates if isinstance(gate, ProjectedGate) and _begins_with_product(gate)]
    found: list[Tensor] = []
    for gate in joined if products else ():
        ready = products.get(cast(Any, gate.projection))  # type: ignore[union-attr]
        found += [] if ready is None else [ready]
    if len(found) < len(joined) and len(joined) > 1:
        weights = [cast(Any, gate.projection).weight for gate in joined]
        found = [*F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1)]
    if len(found) < len(joined) or not joined:
        return [None if gate is None else gate(x) for gate in gates]
    columns = iter(found)
    return [None if gate is None else gate.finish(next(columns)) if gate in joined else gate(x) for gate in gates]


def first_products(gates: Iterable[nn.Module | None]) -> Products:
    """The modules whose products with x the gates begin with, without the products."""
    joined = [gate for gate in gates if isinstance(gate, ProjectedGate) and _begins_with_product(gate)]
    return {cast(nn.Module, gate.projection): None for gate in joined}


def _begins_with_product(gate: ProjectedGate) -> bool:
    """Whether the gate multiplies x with a weight first, and nothing notices how it is called."""
    first = gate.projection
    return first is not None and is_plain(first) and first.bias is None and all(map(is_unhooked, gate.modules()))
