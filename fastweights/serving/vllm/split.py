"""Heads divided among processes (tensor parallelism). Each has some heads of every layer and the whole residual stream, and the
outputs of its layers are summed over the processes.

There is no code per rule: a process builds the layers with fewer heads, and a parameter that has become smaller takes its part of
the saved one. That is right where heads share nothing but their input and the parameters lie head after head, so each mixer is
tried on a few random tokens before a model is served.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import error_prefix
from ...layers import MIXERS, Mixer, build_mixer
from ...layers.heads import head_width
from ...models import FastWeightsConfig

__all__ = ["check_parts", "part_of_config", "part_of_weight"]

HEADS = ("num_heads", "num_v_heads", "num_kv_heads")
WIDTH, TOKENS = 32, 70  # of the trial; more tokens than a chunk has
CLOSE = 1e-6  # in float64, relative to the largest output


def part_of_config(config: FastWeightsConfig, parts: int) -> FastWeightsConfig:
    """The configuration of the layers that one of several processes builds: `config` with fewer heads and a narrower MLP."""
    if parts == 1:
        return config
    part = copy.copy(config)
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size or 0}
    for name, size in divide_sizes(sizes, parts).items():
        setattr(part, name, size)
    mixers: list[str | dict[str, Any]] = []
    for layer, (name, options) in enumerate(config.mixers()):
        width = head_width(config.hidden_size, config.num_heads, options.get("head_dim"))
        given = {**MIXERS[name].options, **options}
        heads = {key: given[key] for key in HEADS if given.get(key) is not None}
        with error_prefix(f"mixer of layer {layer}"):
            mixers.append({"name": name, **options, "head_dim": width, **divide_sizes(heads, parts)})
    part.mixer, part.softmax_layers, part.softmax_options = mixers, [], None
    return part


def divide_sizes(sizes: dict[str, int], parts: int) -> dict[str, int]:
    for name, size in sizes.items():
        if size % parts:
            raise ValueError(f"{name} must be a multiple of tensor_parallel_size, {parts}, got {size}")
    return {name: size // parts for name, size in sizes.items()}


def part_of_weight(weight: Tensor, shape: torch.Size, rank: int, parts: int) -> Tensor:
    """What the process `rank` of several holds of a saved weight, where its own parameter has this shape."""
    for dim, (size, own) in enumerate(zip(weight.shape, shape, strict=True)):
        if size == own * parts:
            return weight.chunk(parts, dim)[rank]
    return weight


def check_parts(config: FastWeightsConfig, parts: int) -> None:
    """ValueError where the heads of a mixer cannot be divided so."""
    pairs = zip(config.mixers(), part_of_config(config, parts).mixers(), strict=True)
    for (name, options), (_, part_options) in dict((repr(pair), pair) for pair in pairs).values():
        backend = {"backend": "auto"} if "backend" in options else {}  # the trial is on the CPU
        part_heads = {"num_heads": config.num_heads // parts, **part_options, **backend}
        heads = {"num_heads": config.num_heads, **options, "head_dim": part_options["head_dim"], **backend}
        refusal = (
            f"tensor_parallel_size must be 1 for a model with {name}, got {parts}; its heads cannot be divided among "
            "processes"
        )
        try:
            error = measure_error(name, heads, part_heads, parts)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"{refusal}: {problem}") from problem
        if not error < CLOSE:
            raise ValueError(f"{refusal}: the outputs of the parts do not add up to those of the layer")


@torch.no_grad()
def measure_error(name: str, options: dict[str, Any], part_options: dict[str, Any], parts: int) -> float:
    """How far the sum of the parts' outputs is from the output of the whole layer, relative to the largest number of that."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        whole: Mixer = build_mixer(name, hidden_size=WIDTH, **options).double().eval()
        for x in whole.parameters():
            x.add_(0.1 * torch.randn_like(x))  # first weights are alike in all heads
        x_1TD = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
        wanted, total = whole(x_1TD), torch.zeros_like(x_1TD)
        for rank in range(parts):
            part: nn.Module = build_mixer(name, hidden_size=WIDTH, **part_options).double().eval()
            own = dict(part.named_parameters())
            for key, x in whole.named_parameters():
                own[key].copy_(part_of_weight(x, own[key].shape, rank, parts))
            total += part(x_1TD)
    return float((total - wanted).abs().max() / wanted.abs().max())
