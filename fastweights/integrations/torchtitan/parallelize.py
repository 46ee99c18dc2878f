"""A model divided among processes: tensor and context parallelism, activation checkpointing, compiled blocks and FSDP2."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from ...distributed import context_parallel
from .model import TitanModel
from .tensor_parallel import divide_heads

__all__ = ["parallelize"]


def parallelize(
    model: TitanModel,
    *,
    parallel_dims: ParallelDims,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> TitanModel:
    """torchtitan's hook: divide a model on the meta device as the trainer's configuration says.

    Raises:
        ValueError: the heads of a mixer cannot be divided among that many processes.
    """
    if parallel_dims.tp_enabled:
        divide_heads(model, parallel_dims.get_dense_tp_mesh())
    if parallel_dims.cp_enabled:
        context_parallel(model, parallel_dims.get_mesh("cp"))
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh([*replicas, "fsdp"]),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan divides no gradient, and gloo has no sum with a factor of 1
            module.set_force_sum_reduction_for_comms(True)
    return model
