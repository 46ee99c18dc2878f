"""Tensor parallelism: every process has some heads of each mixer, part of each MLP, and part of the vocabulary in the embedding
and the output layer.

The parameters are DTensors, so that FSDP2, the optimizer and checkpoints know them whole. Layers compute on the local parts, as
their ops take ordinary tensors: the layers of a process are those of a model with fewer heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ...models import FastWeightsModel
from ...models.parts import check_parts, find_divisions, part_of_config, take_parts

__all__ = ["divide_heads"]


def divide_heads(model: Any, mesh: DeviceMesh) -> None:
    """Divide a `TitanModel` on the meta device among the processes of `mesh`.

    Raises:
        ValueError: a mixer whose heads cannot be divided so, or whose parameters do not lie head after head.
    """
    config, parts = model.config, mesh.size()
    check_parts(config, parts)
    divisions = find_divisions(config, parts)
    for name, division in divisions.items():
        if not (division.dim is None or division.is_contiguous):
            layer = int(name.split(".")[2])
            raise ValueError(
                f"parallelism.tensor_parallel_degree must be 1 for a model with {config.mixer_of(layer)[0]}, got {parts}: "
                f"{name} cannot be divided into equal blocks"
            )
    dtype = model.model.embed_tokens.weight.dtype
    with torch.device("meta"):
        part = FastWeightsModel(part_of_config(config, parts)).to(dtype)
    take_parts([block.mixer for block in part.layers], config, mesh.get_local_rank(), parts, lambda x: _gather(x, mesh))
    for layer, (block, own) in enumerate(zip(model.layers, part.layers, strict=True)):
        prefix = f"model.layers.{layer}."
        dims = {name.removeprefix(prefix): x.dim for name, x in divisions.items() if name.startswith(prefix)}
        _divide_block(block, own, dims, mesh)
    _distribute(model.norm, {"weight": None, "bias": None}, mesh)
    whole, logits = Replicate(), Shard(2)
    parallelize_module(model.tok_embeddings, mesh, RowwiseParallel(input_layouts=whole, output_layouts=whole))
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=logits, use_local_output=False))
    model.tie_weights()


def _divide_block(block: Any, own: Any, dims: dict[str, int | None], mesh: DeviceMesh) -> None:
    """Give a block the mixer and the MLP of a block with fewer heads, `own`. dims: which dimension of each parameter of the block
    the processes divide."""
    block.mixer, block.mlp = own.mixer, own.mlp
    for path, module in block.named_modules():
        here = {name: dims[f"{path}.{name}"] for name, _ in module.named_parameters(recurse=False)}
        _distribute(module, here, mesh, inside=path.partition(".")[0] in ("mixer", "mlp"))
    branches = [(block.mixer_norm, block.mixer)]
    if block.mlp is not None:
        branches.append((block.mlp_norm, block.mlp.down_proj))
    for norm, output in branches:
        norm.register_forward_hook(lambda module, given, x: _share(x, mesh))
        output.register_forward_hook(lambda module, given, x: _sum(x, mesh))


def _distribute(module: nn.Module, dims: dict[str, int | None], mesh: DeviceMesh, inside: bool = False) -> None:
    """Make the module's own parameters, of which each process has its part, DTensors that the module reads as their local parts.
    inside: whether it computes for the heads of one process, so that a whole parameter gets part of its gradient there."""
    gradients: dict[str, Any] = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = dims[name]
        placement = Replicate() if dim is None else Shard(dim)
        gradients[name] = Partial() if inside and dim is None else placement
        whole = DTensor.from_local(parameter.detach(), mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    if gradients:
        _read_locally(module, mesh, gradients)


def _read_locally(module: nn.Module, mesh: DeviceMesh, gradients: dict[str, Any]) -> None:
    """Let the module's attributes be the local parts of its DTensor parameters. Those that FSDP2 has divided further stay as they
    are: it reads them by the same names, and replaces them while the module computes. gradients: their placements."""

    def local(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            parameter: Any = self._parameters[name]
            return parameter.to_local(grad_placements=[gradients[name]]) if parameter.device_mesh == mesh else parameter

        return property(read)

    properties = {name: local(name) for name in gradients}
    module.__class__ = type(f"Divided{type(module).__name__}", (type(module),), properties)


def _share(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The input of layers of which each process computes a part: its gradient is the sum of theirs."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what the processes have."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensors [..., n] of all processes as [..., parts n], of which each process uses what it needs."""
    whole = DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])
