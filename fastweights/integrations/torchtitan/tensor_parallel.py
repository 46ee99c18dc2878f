"""Tensor parallelism: every process has some heads of each mixer, part of each MLP, and part of the vocabulary in the embedding
and the output layer.

Parameters are DTensors, so that FSDP2, the optimizer and checkpoints know them whole. Layers compute on their local parts, as
their ops take ordinary tensors: the layers of a process are those of a model with fewer heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ...models import FastWeightsModel
from ...models.parts import Division, check_parts, find_divisions, part_of_config, take_parts

__all__ = ["divide_heads"]


def divide_heads(model: Any, mesh: DeviceMesh) -> None:
    """Divide a `TitanModel` on the meta device among the processes of `mesh`.

    Raises:
        ValueError: heads or an MLP that so many processes cannot divide.
    """
    config, parts = model.config, mesh.size()
    check_parts(config, parts)
    divisions = find_divisions(config, parts)
    with torch.device("meta"):
        part = FastWeightsModel(part_of_config(config, parts)).to(model.norm.weight.dtype)
    take_parts([block.mixer for block in part.layers], config, mesh.get_local_rank(), parts, lambda x: _gather(x, mesh))
    for layer, (block, own) in enumerate(zip(model.layers, part.layers, strict=True)):
        prefix = f"model.layers.{layer}."
        here = {name.removeprefix(prefix): x for name, x in divisions.items() if name.startswith(prefix)}
        _divide_block(block, own, here, mesh)
    _distribute(
        model.norm, model.norm, {name: divisions[f"model.norm.{name}"] for name in model.norm.state_dict()}, mesh
    )
    _divide_embedding(model.tok_embeddings, mesh)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Shard(2), use_local_output=False))
    model.tie_weights()


def _divide_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Give each process part of the vocabulary. torch's RowwiseParallel does not wait for the sum of their outputs: a tensor that
    is still waited for gets no gradient from compiled blocks."""
    weight = distribute_tensor(embedding.weight.detach(), mesh, [Shard(0)])
    embedding.register_parameter("weight", nn.Parameter(weight))
    embedding.register_forward_pre_hook(
        lambda module, given: (DTensor.from_local(given[0], mesh, [Replicate()], run_check=False),)
    )
    embedding.register_forward_hook(lambda module, given, x: x.redistribute(placements=[Replicate()]).to_local())


def _divide_block(block: Any, own: Any, divisions: dict[str, Division], mesh: DeviceMesh) -> None:
    """Give a block the mixer and the MLP of a block with fewer heads, `own`. divisions: by the names of the parameters in it."""
    wholes = dict(block.named_modules())
    block.mixer, block.mlp = own.mixer, own.mlp
    for path, module in block.named_modules():
        here = {name: divisions[f"{path}.{name}"] for name, _ in module.named_parameters(recurse=False)}
        _distribute(module, wholes[path], here, mesh, inside=path.partition(".")[0] in ("mixer", "mlp"))
    branches = [(block.mixer_norm, block.mixer)]
    if block.mlp is not None:
        branches.append((block.mlp_norm, block.mlp.down_proj))
    for norm, output in branches:
        norm.register_forward_hook(lambda module, given, x: _share(x, mesh))
        output.register_forward_hook(lambda module, given, x: _sum(x, mesh))


def _distribute(
    module: nn.Module, whole: nn.Module, divisions: dict[str, Division], mesh: DeviceMesh, inside: bool = False
) -> None:
    """Make the module's own parameters DTensors that the module reads as the parts of this process. A parameter whose parts are
    no equal blocks stays whole on every process, and the module reads its part of it.

    Args:
        whole: the module of the whole model.
        inside: whether the module computes for the heads of one process, which has only part of the gradient of a parameter
            that is whole.
    """
    properties = {}
    for name, division in divisions.items():
        dim = division.dim if division.is_contiguous else None
        parameter = (whole if dim is None else module).get_parameter(name)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        distributed = DTensor.from_local(parameter.detach(), mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
        gradient = Partial() if inside and dim is None else placement
        properties[name] = _local_part(name, division, mesh, gradient)
    if properties:
        module.__class__ = type(f"Divided{type(module).__name__}", (type(module),), properties)


def _local_part(name: str, division: Division, mesh: DeviceMesh, gradient: Placement) -> property:
    """A property that reads a DTensor parameter of a module as this process's part of it. A parameter that FSDP2 has divided
    further stays as it is: FSDP2 reads it by the same name, and replaces it while the module computes."""

    def read(module: nn.Module) -> Tensor | None:
        parameter: Any = module._parameters[name]
        if parameter.device_mesh != mesh:
            return parameter
        local = parameter.to_local(grad_placements=[gradient])
        return local if division.is_contiguous else division.take(local, mesh.get_local_rank())

    return property(read)


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
