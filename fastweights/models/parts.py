"""Heads divided among processes (tensor parallelism). Each process has some heads of every layer, part of every MLP and the whole
residual stream. The outputs of its layers are summed over the processes.

There is no code per rule. A process builds the layers with fewer heads, and the shapes of its parameters tell how the saved ones
are divided. A layer says what the shapes do not tell: `Mixer.head_counts`, `Mixer.sections` and `Mixer.take_part`. Each mixer is
tried on a few random tokens before a model is divided.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import error_prefix
from ..layers import MIXERS, HeadPart, Mixer, build_mixer
from ..layers.heads import head_width
from .causal_lm import FastWeightsForCausalLM
from .configuration import FastWeightsConfig

__all__ = ["Division", "check_parts", "find_divisions", "part_of_config", "take_parts"]

WIDTH, TOKENS = 32, 70  # of the trial; more tokens than a chunk has
CLOSE = 1e-6  # in float64, relative to the largest output
PATIENCE = 60  # seconds that one part of the trial waits for the others


def part_of_config(config: FastWeightsConfig, parts: int) -> FastWeightsConfig:
    """The configuration of the layers that one of several processes builds: `config` with fewer heads and a narrower MLP.

    Raises:
        ValueError: heads or an MLP that so many processes cannot divide.
    """
    if parts == 1:
        return config
    part = copy.copy(config)
    part.intermediate_size = divide_count("intermediate_size", config.intermediate_size or 0, parts)
    mixers: list[str | dict[str, Any]] = []
    for layer, (name, options) in enumerate(config.mixers()):
        width = head_width(config.hidden_size, config.num_heads, options.get("head_dim"))
        with error_prefix(f"mixer of layer {layer}"):
            counts = divide_counts(count_heads(config, name, options), parts)
        part.num_heads = counts.pop("num_heads")
        mixers.append({"name": name, **options, "head_dim": width, **counts})
    part.mixer, part.softmax_layers, part.softmax_options = mixers, [], None
    return part


def count_heads(config: FastWeightsConfig, name: str, options: dict[str, Any]) -> dict[str, int]:
    """The options of a mixer that count heads, those left out by their defaults."""
    spec = MIXERS[name]
    defaults = {key: one.default for key, one in inspect.signature(spec.layer).parameters.items()}
    given = {**defaults, **spec.options, **options, "num_heads": config.num_heads}
    return {key: given[key] for key in (*spec.layer.head_counts, "num_heads") if given.get(key) is not None}


def divide_counts(counts: dict[str, int], parts: int) -> dict[str, int]:
    """Heads of one part. The first count must be a multiple of the parts; parts may share what the others count."""
    first = next(iter(counts))
    return {name: divide_count(name, count, parts, shared=name != first) for name, count in counts.items()}


def divide_count(name: str, count: int, parts: int, shared: bool = False) -> int:
    if count % parts == 0:
        return count // parts
    if shared and parts % count == 0:
        return 1
    raise ValueError(
        f"{name} must be a multiple {'or a divisor ' if shared else ''}of the number of tensor-parallel processes, {parts}, "
        f"got {count}; use another number of processes"
    )


@dataclass(frozen=True)
class Division:
    """How the processes divide a parameter.

    Attributes:
        dim: the dimension that is divided; None where every process has the whole parameter.
        sections: sizes along this dimension of the sections that are divided one by one, in the whole and in a part. Several
            processes have the same part of a section that is smaller than all parts of it together.
        parts: number of processes.
    """

    dim: int | None
    sections: tuple[tuple[int, int], ...]
    parts: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the parts one after another are the whole parameter, as `torch.chunk` and DTensor's `Shard(dim)` divide it."""
        return len(self.sections) == 1 and self._sharing == [1]

    @property
    def _sharing(self) -> list[int]:
        """How many processes have the same part of each section."""
        return [own * self.parts // whole for whole, own in self.sections]

    def take(self, x: Tensor, rank: int) -> Tensor:
        """What the process `rank` has of the parameter x."""
        if self.dim is None:
            return x
        sections = x.split([whole for whole, _ in self.sections], self.dim)
        taken = [
            section.narrow(self.dim, rank // sharing * own, own)
            for section, sharing, (_, own) in zip(sections, self._sharing, self.sections, strict=True)
        ]
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)


def find_division(name: str, whole: Tensor, part: Tensor, sections: Sequence[Sequence[int]], parts: int) -> Division:
    """How `part` is a part of the parameter `whole`. sections: the sizes that the whole layer and the part declare, or none."""
    dims = [dim for dim, (size, own) in enumerate(zip(whole.shape, part.shape, strict=True)) if size != own]
    if not dims:
        return Division(None, (), parts)
    dim = dims[0]
    pairs = tuple(pair for pair in zip(*sections, strict=True) if any(pair)) or ((whole.shape[dim], part.shape[dim]),)
    fits = all(own and size % own == 0 and own * parts % size == 0 for size, own in pairs)
    if len(dims) > 1 or (sections and dim) or not fits:
        raise ValueError(
            f"{name} of shape {tuple(whole.shape)} cannot be divided among {parts} processes of shape {tuple(part.shape)}"
        )
    return Division(dim, pairs, parts)


def divide_module(whole: nn.Module, part: nn.Module, parts: int) -> dict[str, Division]:
    """How each parameter of `whole` is divided, by name. part: the same module with the heads of one process."""
    own = dict(part.named_parameters())
    declared = [collect_sections(module) for module in (whole, part)]
    divisions = {}
    for name, x in whole.named_parameters():
        key = name if name in declared[0] else name.rpartition(".")[0]
        sections = [one[key] for one in declared if key in one]
        divisions[name] = find_division(name, x, own[name], sections, parts)
    return divisions


def collect_sections(module: nn.Module) -> dict[str, Sequence[int]]:
    """`Mixer.sections` of all mixers inside the module, by the names that the parameters and modules have in it."""
    return {
        f"{prefix}.{name}" if prefix else name: sizes
        for prefix, mixer in module.named_modules()
        if isinstance(mixer, Mixer)
        for name, sizes in mixer.sections().items()
    }


def find_divisions(config: FastWeightsConfig, parts: int) -> dict[str, Division]:
    """How the processes divide each parameter of `FastWeightsForCausalLM(config)`, by name. Embeddings stay whole."""
    with torch.device("meta"):
        whole, part = (FastWeightsForCausalLM(one) for one in (config, part_of_config(config, parts)))
    return divide_module(whole, part, parts)


def take_parts(
    mixers: Iterable[Mixer], config: FastWeightsConfig, rank: int, parts: int, gather: Callable[[Tensor], Tensor]
) -> None:
    """Tell the mixers of `part_of_config(config, parts)` which part of the heads they have. gather: see `HeadPart`."""
    for mixer, (name, options) in zip(mixers, config.mixers(), strict=True):
        mixer.take_part(HeadPart(rank, parts, gather, count_heads(config, name, options)))


def check_parts(config: FastWeightsConfig, parts: int) -> None:
    """ValueError where the heads of a mixer cannot be divided so."""
    part = part_of_config(config, parts)
    for layer in dict((repr(mixer), layer) for layer, mixer in enumerate(config.mixers())).values():
        name = config.mixers()[layer][0]
        refusal = f"the heads of {name} cannot be divided among {parts} processes"
        try:
            error = measure_error(config, part, layer, parts)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"{refusal}: {problem}") from problem
        if not error < CLOSE:
            raise ValueError(
                f"{refusal}: the outputs of the parts do not add up to those of the layer; use one process"
            )


@torch.no_grad()
def measure_error(config: FastWeightsConfig, part: FastWeightsConfig, layer: int, parts: int) -> float:
    """How far the sum of the parts' outputs is from the output of the whole layer, relative to the largest number of that."""
    meeting = Meeting(parts)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        whole, *layers = build_trial(config, part, layer, meeting)
        x_1TD = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
        given: list[dict[str, Tensor]] = [{} for _ in range(parts + 1)]
        if whole.takes_first_values:
            trials = (build_trial(config, part, earlier, meeting) for earlier in range(layer))
            givers = next((trial for trial in trials if trial[0].gives_values), [])
            given = [{"first_values": giver.values(x_1TD)} for giver in givers] or given
    wanted = whole(x_1TD, **given[0])
    total = sum(meeting.run([partial(one, x_1TD, **more) for one, more in zip(layers, given[1:], strict=True)]))
    return float((total - wanted).abs().max() / wanted.abs().max())


def build_trial(config: FastWeightsConfig, part: FastWeightsConfig, layer: int, meeting: Meeting) -> list[Mixer]:
    """A narrow layer with the heads of `config`, then the parts of it, which have its weights."""
    (name, options), (_, part_options) = config.mixers()[layer], part.mixers()[layer]
    given = {"hidden_size": WIDTH, "head_dim": part_options["head_dim"]}
    backend = {"backend": "auto"} if "backend" in options else {}  # the trial is on the CPU
    whole = build_mixer(name, **{**options, **given, **backend, "num_heads": config.num_heads}).double().eval()
    for x in whole.parameters():
        x.add_(0.1 * torch.randn_like(x))  # first weights are alike in all heads
    layers, counts = [whole], count_heads(config, name, options)
    for rank in range(meeting.parts):
        one = build_mixer(name, **{**part_options, **given, **backend, "num_heads": part.num_heads}).double().eval()
        one.take_part(HeadPart(rank, meeting.parts, partial(meeting.gather, rank), counts))
        own = dict(one.named_parameters())
        for key, division in divide_module(whole, one, meeting.parts).items():
            own[key].copy_(division.take(whole.get_parameter(key), rank))
        layers.append(one)
    return layers


class Meeting:
    """Parts of a layer that run in threads of this process and wait for each other where they gather."""

    def __init__(self, parts: int) -> None:
        self.parts, self.barrier = parts, threading.Barrier(parts, timeout=PATIENCE)
        self.held: list[Any] = [None] * parts

    def gather(self, rank: int, x: Tensor) -> Tensor:
        self.held[rank] = x
        self.barrier.wait()
        joined = torch.cat(self.held, -1)
        self.barrier.wait()
        return joined

    def run(self, calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """What each call gives."""
        with ThreadPoolExecutor(self.parts) as pool:
            return list(pool.map(torch.no_grad()(lambda call: call()), calls))
