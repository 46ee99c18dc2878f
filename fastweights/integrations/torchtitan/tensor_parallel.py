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
from ...models.parts import Division, check_parts, find_divisions, part_of_config, take_parts

__all__ = ["divide_heads"]


def divide_heads(model: Any, mesh: DeviceMesh) -> None:
    """Divide a `TitanModel` on the meta device among the processes of `mesh`.

    Raises:
        ValueError: a mixer whose heads cannot be divided so, or whose parameters do not lie head after head.
    """
    config, parts = model.config.architecture, mesh.size()
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
    take_parts(
        [block.mixer for block in part.layers], config, mesh.get_local_rank(), parts, lambda x: _gather(x, mesh)
    )
    for layer, (block, own) in enumerate(zip(model.layers, part.layers, strict=True)):
        block.mixer, block.mlp = own.mixer, own.mlp
        for path, module in block.named_modules():
            inside = path.startswith(("mixer.", "mlp.")) or path == "mixer"
            prefix = f"model.layers.{layer}.{path}."
            _distribute(module, {n: divisions[prefix + n] for n, _ in module.named_parameters(recurse=False)}, mesh, inside)
        for norm in (block.mixer_norm, *([] if block.mlp is None else [block.mlp_norm])):
            norm.register_forward_hook(lambda module, given, x: _share(x, mesh))
        for output in (block.mixer, *([] if block.mlp is None else [block.mlp.down_proj])):
            output.register_forward_hook(lambda module, given, x: _sum(x, mesh))
    _distribute(model.norm, {}, mesh, inside=False)
    parallelize_module(model.tok_embeddings, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    logits = ColwiseParallel(output_layouts=Shard(2), use_local_output=False)
    parallelize_module(model.lm_head, mesh, logits)
    model.tie_weights()


def _distribute(module: nn.Module, divisions: dict[str, Division], mesh: DeviceMesh, inside: bool) -> None:
    """Make the module's own parameters, of which each process has its part, DTensors that the module reads as their local parts.
    inside: whether it computes for the heads of one process, so that a whole parameter gets part of its gradient there."""
    placements = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = divisions[name].dim if name in divisions else None
        placements[name] = Replicate() if dim is None else Shard(dim)
        whole = DTensor.from_local(parameter.detach(), mesh, [placements[name]], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    if placements:
        _read_locally(module, {name: Partial() if inside and x.is_replicate() else x for name, x in placements.items()})


def _read_locally(module: nn.Module, gradients: dict[str, Any]) -> None:
    """Let the module's attributes be the local parts of its DTensor parameters, whatever FSDP2 puts into their place. gradients:
    the placement of each one's gradient."""

    def local(name: str) -> property:
        return property(lambda self: self._parameters[name].to_local(grad_placements=[gradients[name]]))

    names = {name: local(name) for name in gradients}
    module.__class__ = type(f"Divided{type(module).__name__}", (type(module),), names)


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
