"""What a training will need, before it starts: memory of a GPU, and time on one that is named.

Weights, gradients and the state of the optimizer are counted exactly. Activations are estimated from the widths of the layers
(`activation_bytes`), and the time from the operations of the matrix products and a utilisation (`UTILISATION`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...checks import check_choice, check_size
from ...layers import Mixer, SoftmaxAttention
from ...ops.context_parallel.costs import H100_LINK, link_speed
from .communication import exchanged_bytes, exchanges, gradient_bytes, tokens_of_process
from .optimizers import muon_matrices
from .run import UNSHARDED, LanguageRun
from .schedule import StepPlan

__all__ = [
    "GPUS",
    "Gpu",
    "Machine",
    "StepSeconds",
    "activation_bytes",
    "choose_sharding",
    "describe_memory",
    "describe_time",
    "memory_parts",
    "optimizer_bytes",
    "parse_machine",
    "step_operations",
    "step_seconds",
]

GIB = 2**30
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))
CHUNK = 64  # tokens between two states that a memory keeps for its backward
RESERVED = 0.06  # of a GPU's memory, for CUDA itself and what the allocator cannot use
LEAST_ACTIVATIONS, MOST_ACTIVATIONS = 0.7, 1.53  # of the estimate: beyond them no measured training was
# Part of the peak that trainings with `gdn` reached on an H100: .31 with 24 layers of width 1024, .38 with the 1B preset.
UTILISATION = 0.35
BACKWARD = 2 / 3  # of the time of a step without recomputation


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes, its peak of dense matrix products in operations per second, and bytes per second that it sends to
    another one of its host, from its maker's data sheet."""

    memory: float
    bfloat16: float
    float32: float
    link: float


GPUS = {
    "a100-40gb": Gpu(40e9, 312e12, 19.5e12, 300e9),
    "a100": Gpu(80e9, 312e12, 19.5e12, 300e9),
    "b200": Gpu(180e9, 2250e12, 75e12, 900e9),
    "gh200": Gpu(96e9, 989e12, 67e12, 450e9),
    "h100": Gpu(80e9, 989e12, 67e12, H100_LINK),
    "h200": Gpu(141e9, 989e12, 67e12, 450e9),
    "l40s": Gpu(48e9, 362e12, 91.6e12, 32e9),
    "rtx3090": Gpu(24e9, 71e12, 35.6e12, 32e9),
    "rtx4090": Gpu(24e9, 165e12, 82.6e12, 32e9),
}


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, one process each."""

    name: str
    count: int

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.name]


def parse_machine(text: str) -> Machine:
    """A GPU by its name, or several as in "8xh100".

    Raises:
        ValueError: another name, or a number that is not positive.
    """
    several = re.fullmatch(r"(\d+)\s*x\s*(.+)", text.lower())
    count, name = several.groups() if several else ("1", text.lower())
    check_choice("gpu", name, GPUS)
    return Machine(name, check_size("number of GPUs", int(count)))


def describe_memory(run: LanguageRun, model: Any, processes: int, machine: Machine | None = None) -> str:
    """Memory per process in words. model: may be without memory for its weights, on the meta device.

    Raises:
        ValueError: the training does not fit into the memory of a GPU of the machine.
    """
    parts = memory_parts(run, model, processes)
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items())
    if machine is None:
        return f"about {total / GIB:.3g} GiB per process: {listed}"
    room = machine.gpu.memory * (1 - RESERVED)
    least = total - (1 - LEAST_ACTIVATIONS) * parts["activations"]
    if least > room:
        raise ValueError(
            f"the training must fit into the {room / GIB:.1f} GiB that one {machine.name} has to give, and needs at least "
            f"{least / GIB:.1f} per GPU, about {total / GIB:.1f} ({listed}); halve batch_size and double accumulation, set "
            "gradient_checkpointing = true, or with several GPUs fsdp = true or a larger context_parallel"
        )
    doubt = ", which may not fit" if total > room else ""
    return f"about {total / GIB:.1f} GiB of {room / GIB:.1f} per GPU{doubt}: {listed}"


def choose_sharding(run: LanguageRun, model: Any, processes: int, memory: float | None) -> bool:
    """Whether several processes shard parameters (FSDP2). `run.fsdp`; where it is None, whether a copy of all parameters on every
    GPU might not fit, by the largest activations that were measured beside an estimate. FSDP2 was as fast as DDP.

    Args:
        model: may be without memory for its weights, on the meta device.
        memory: bytes of each GPU; None without one.
    """
    if run.fsdp is not None:
        return run.fsdp
    if memory is None or processes == 1 or run.optimizer in UNSHARDED or run.compile is True:
        return False
    parts = memory_parts(run, model, processes)
    return sum(parts.values()) + (MOST_ACTIVATIONS - 1) * parts["activations"] > memory * (1 - RESERVED)


def describe_time(run: LanguageRun, model: Any, plan: StepPlan, machine: Machine) -> str:
    """The time of a training in words."""
    step, (_, rows) = step_seconds(run, model, machine), plan.parts[-1]
    seconds = step.total * plan.tokens(plan.steps) / (rows * plan.passes * plan.length)
    unit, size = next(((unit, size) for unit, size in UNITS if seconds >= 2 * size), ("seconds", 1))
    return (
        f"about {seconds / size:,.1f} {unit} on {machine.count} {machine.name}, at {UTILISATION:.0%} of the peak of its matrix "
        f"products{f', {step.exchange / step.total:.0%} of it to exchange tokens or states' * (run.context_parallel > 1)}"
    )


@dataclass(frozen=True)
class StepSeconds:
    """The predicted time of a step of a process.

    Attributes:
        products: of its matrix products, at `UTILISATION`.
        exchange: of what context parallelism sends, during which nothing is computed.
        gradients: of what DDP or FSDP2 sends, during the backward as far as that takes as long.
    """

    products: float
    exchange: float
    gradients: float

    @property
    def total(self) -> float:
        return self.products + self.exchange + max(0.0, self.gradients - BACKWARD * self.products)


def step_seconds(run: LanguageRun, model: Any, machine: Machine) -> StepSeconds:
    """The prediction for a step of the largest batch, after batch ramps."""
    gpu, tokens = machine.gpu, run.accumulation * run.batch_size * run.length / run.context_parallel
    peak = gpu.float32 if run.precision == "no" else gpu.bfloat16
    return StepSeconds(
        products=step_operations(run, model) * tokens / (peak * UTILISATION),
        exchange=exchanged_bytes(run, model) / link_speed(gpu.link, run.context_parallel),
        gradients=gradient_bytes(run, model, machine.count) / link_speed(gpu.link, machine.count),
    )


def memory_parts(run: LanguageRun, model: Any, processes: int = 1) -> dict[str, float]:
    """Bytes per process: weights and gradients in float32, the optimizer's state, activations, and what stands beside the
    model."""
    weights, gradients = 4 * model.num_parameters(), 4 * model.num_parameters(only_trainable=True)
    shared = processes if run.fsdp else 1
    # Where gradients are added up over several passes, DDP keeps them in buckets too.
    copies = 2 if processes > 1 and not run.fsdp and run.accumulation > 1 else 1
    return {
        "weights": weights / shared,
        "gradients": copies * gradients / shared,
        "optimizer": optimizer_bytes(run, model) / shared,
        "activations": activation_bytes(run, model),
        **run.memory_beside(processes),
    }


def optimizer_bytes(run: LanguageRun, model: nn.Module) -> float:
    """Of the state of the run's optimizer, beside its counters of steps."""
    matrices = muon_matrices(model) if run.optimizer == "muon" else set()
    total = 0
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        size = parameter.numel()
        if run.optimizer == "adafactor":  # of matrices sums over rows and columns
            total += 4 * (size if parameter.ndim < 2 else size // parameter.shape[-1] + size // parameter.shape[-2])
        else:
            total += 4 * size * (1 if id(parameter) in matrices else 2)
    return total


def activation_bytes(run: LanguageRun, model: Any) -> float:
    """What forward keeps for backward, of one pass of one process, which with context_parallel = N has one of N parts of the
    tokens. Per token and block: the output of every linear layer and
    what is computed of it, in the precision of the matrix products; the residual stream twice in float32; and the state of the
    memory every 64 tokens. Weights are kept once more in 16 bits where products are in that precision. 79 measured trainings
    on an H200 took between .73 and 1.53 times as much, the most with Lattice's rules. Processes that pass states on hold the
    operands of the sums that they form again, of one block at a time.

    With gradient_checkpointing, the residual stream of every block, and all of one block.
    """
    size = 4 if run.precision == "no" else 2
    kept = [_block_bytes(block, model.config.hidden_size, size) for block in model.model.layers]
    rows = max([run.batch_size, *(stage.batch_size for stage in run.batch_ramp)])
    tokens = tokens_of_process(run, rows)
    per_token = sum(kept)
    if run.gradient_checkpointing:
        per_token = 4 * model.config.hidden_size * len(kept) + max(kept)
    copies = size * model.num_parameters() if size == 2 else 0
    held = max((one.held for one in exchanges(run, model)), default=0.0) if run.context_parallel > 1 else 0.0
    return tokens * per_token + copies + held


def _mixer(block: Any) -> Any:
    """The mixer of a block; of a block of transformers the memory of its attention, or the attention itself."""
    return block.mixer if hasattr(block, "mixer") else getattr(block.self_attn, "memory", block.self_attn)


def _block_bytes(block: Any, width: int, size: int) -> float:
    """Bytes per token."""
    outputs = sum(part.out_features for part in block.modules() if isinstance(part, nn.Linear))
    mixer = _mixer(block)
    states = mixer.state_size(CHUNK) if isinstance(mixer, Mixer) else 0
    return 2 * size * outputs + 2 * 4 * width + 4 * states / CHUNK


def step_operations(run: LanguageRun, model: Any) -> float:
    """Operations per token of forward and backward: six per weight of a linear layer, and 6 S H K for each of the two products
    of softmax attention over S earlier tokens, on average half a row. Those of memories, a few percent, are left out.
    gradient_checkpointing adds another forward."""
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    attention = 0.0
    for mixer in map(_mixer, model.model.layers):
        if isinstance(mixer, SoftmaxAttention) or not isinstance(mixer, Mixer):
            window = getattr(mixer, "window", None) or getattr(mixer, "sliding_window", None) or math.inf
            attention += 2 * 6 * min(run.length / 2, window) * mixer.q_proj.out_features
    return (6 * weights + attention) * (4 / 3 if run.gradient_checkpointing else 1)
