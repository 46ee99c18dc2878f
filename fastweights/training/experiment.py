"""A recall experiment: one run, and the grid of runs to compare. Frozen, checked when created."""

import dataclasses
import itertools
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from ..checks import (
    LARGEST_COUNT,
    LARGEST_DEPTH,
    LARGEST_HEADS,
    LARGEST_WIDTH,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    check_size,
    check_text,
    check_whole_number,
    describe_value,
)
from ..data import Task, make_task
from ..layers import MixerChoice
from ..models import FastWeightsConfig
from .optimization import SCHEDULES

__all__ = ["RecallExperiment", "RecallRun", "Stage"]


LARGEST = {
    "vocab_size": 2**20,
    "width": LARGEST_WIDTH,
    "heads": LARGEST_HEADS,
    "layers": LARGEST_DEPTH,
    "steps": LARGEST_COUNT,
    "batch_size": 2**20,
    "test_examples": 2**24,
    "train_examples": 2**24,
    "evaluations": LARGEST_COUNT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a curriculum.

    Attributes:
        pairs: key-value pairs in a sequence.
        steps: optimizer steps.
        length: tokens in a sequence; None takes the task's own length for the number of pairs.
        batch_size: sequences in a step; None takes that of the run.
    """

    pairs: int
    steps: int
    length: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("pairs", "steps", "length", "batch_size"):
            if getattr(self, name) is not None or name in ("pairs", "steps"):
                size = check_size(f"{name} of a stage", getattr(self, name), high=LARGEST.get(name, LARGEST_COUNT))
                object.__setattr__(self, name, size)


# Settings that came after the first result files were written, with the values that those files were made with.
_LATER: dict[str, Any] = {
    "task_options": {}, "warmup_start": 0.0, "initializer_range": 0.02, "intermediate_size": None, "tie_word_embeddings": False,
    "scale_residuals": True, "softmax_layers": [], "train_examples": None, "curriculum": [], "beta1": 0.9, "beta2": 0.999,
    "schedule": "cosine",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings that all runs of an experiment share.

    Attributes:
        task: name of the recall task, a key of `fastweights.data.TASKS`.
        task_options: the task's own options by name, such as {"random_non_queries": False}; see the task's class.
        length: tokens in a sequence; None takes the task's own length for the number of pairs.
        vocab_size: number of different tokens; tasks of vectors have none.
        width: size of the residual stream (hidden_size of the model).
        heads: heads of every mixer; must divide `width`.
        layers: number of blocks (mixer and MLP).
        intermediate_size: width of the MLP; 8/3 of `width` rounded up to a multiple of 64 when None, 0 for no MLP.
        tie_word_embeddings: whether the output layer shares the embedding's weights.
        scale_residuals: whether the first weights of what writes to the residual stream shrink with the depth.
        softmax_layers: blocks, counted from 0, whose mixer is softmax attention in every model (hybrids).
        steps: optimizer steps.
        batch_size: sequences in a step.
        train_examples: size of a fixed training set that is read again and again, in a new order each time; None for fresh
            sequences in every step.
        curriculum: stages of rising difficulty, trained one after the other by one optimizer. pairs, length and steps are then
            those of the stages (the last one's, and the sum).
        beta1, beta2: AdamW's.
        weight_decay: AdamW's decoupled weight decay, on matrices only.
        schedule: of the learning rate after the warm-up, "cosine" or "constant".
        warmup_fraction: part of `steps` over which the learning rate rises linearly to its peak.
        warmup_start: the learning rate at the first step, as a part of the peak; 0 for the first of equal parts.
        final_fraction: the learning rate at the last step, as a part of the peak (cosine decay in between).
        max_gradient_norm: the gradient is scaled down to this norm when it is larger.
        initializer_range: standard deviation of the model's first weights.
        test_examples: held-out sequences that the model is measured on.
        evaluations: how often it is measured in a run, the last time at its end.
        device: torch device, "cpu", "cuda", "cuda:1".
    """

    task: str = "mqar-shuffled"
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    length: int | None = None
    vocab_size: int = 64
    width: int = 32
    heads: int = 4
    layers: int = 1
    intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    scale_residuals: bool = True
    softmax_layers: tuple[int, ...] = ()
    steps: int = 800
    batch_size: int = 32
    train_examples: int | None = None
    curriculum: tuple[Stage, ...] = ()
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup_fraction: float = 0.1
    warmup_start: float = 0.0
    final_fraction: float = 0.1
    max_gradient_norm: float = 1.0
    initializer_range: float = 0.02
    test_examples: int = 1024
    evaluations: int = 4
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_options", _checked_options(self.task_options))
        for name, largest in LARGEST.items():
            if name != "train_examples" or self.train_examples is not None:
                object.__setattr__(self, name, check_size(name, getattr(self, name), high=largest))
        for name in ("warmup_fraction", "warmup_start", "final_fraction"):
            check_number(name, getattr(self, name), low=0, high=1)
        self._check_layers_and_stages()
        largest = max([self.batch_size, *(stage.batch_size or 0 for stage in self.curriculum)])
        if self.train_examples is not None and self.train_examples < largest:
            raise ValueError(
                f"train_examples must be at least batch_size, {largest}, got {self.train_examples}; raise it, or leave it out "
                "for fresh sequences in every step"
            )
        for name in ("tie_word_embeddings", "scale_residuals"):
            check_flag(name, getattr(self, name))
        check_choice("schedule", self.schedule, SCHEDULES)
        for name in ("beta1", "beta2"):
            check_number(name, getattr(self, name), low=0, below=1)
        check_number("weight_decay", self.weight_decay, low=0)
        for name in ("max_gradient_norm", "initializer_range"):
            check_positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and {self.heads} heads; change one of them"
            )
        _check_device(self.device)

    def _check_layers_and_stages(self) -> None:
        for name, kind in (("softmax_layers", int), ("curriculum", Stage)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
                raise TypeError(
                    f"{name} must be a tuple of {'layer numbers' if kind is int else 'Stage'}, got {describe_value(values)}"
                )
        for layer in self.softmax_layers:
            check_whole_number("softmax_layers", layer, high=self.layers - 1)
        if self.curriculum:
            last, total = self.curriculum[-1], sum(stage.steps for stage in self.curriculum)
            for name, value in (("length", last.length), ("steps", total)):
                self._from_stages(name, value)

    def _from_stages(self, name: str, value: Any) -> None:
        """Set a setting that the curriculum decides."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        if getattr(self, name) not in (default, value):
            raise ValueError(
                f"{name} must be left out with a curriculum, whose stages say {value}, got {getattr(self, name)}"
            )
        object.__setattr__(self, name, value)

    def record(self) -> dict[str, Any]:
        """The settings as plain values, as files hold them. Settings of _LATER are left out at their defaults, so that
        files from before there were any describe the same run."""
        values = {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}
        return {name: x for name, x in values.items() if name not in _LATER or x != _LATER[name]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallRun(_Settings):
    """One model, trained once.

    Attributes:
        mixer: the memory layer, a key of `fastweights.layers.MIXERS`, or a `MixerChoice` with options and a label.
        pairs: key-value pairs in a sequence.
        learning_rate: peak learning rate.
        seed: of the initial parameters and of the data.
    """

    mixer: str | MixerChoice
    pairs: int
    learning_rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.choice
        check_positive("learning_rate", self.learning_rate)
        object.__setattr__(self, "seed", check_whole_number("seed", self.seed))
        if self.curriculum and self.pairs != self.curriculum[-1].pairs:
            raise ValueError(
                f"pairs must be that of the curriculum's last stage, {self.curriculum[-1].pairs}, got {self.pairs}"
            )
        self.stages()
        self.model_config()

    @property
    def choice(self) -> MixerChoice:
        """Name, options and label of the memory layer."""
        return _choice(self.mixer)

    @property
    def name(self) -> str:
        """A name that no other run of the experiment has; valid as a file name."""
        return f"{_file_name(self.choice.label)}-pairs{self.pairs}-lr{self.learning_rate!r}-seed{self.seed}"

    @property
    def title(self) -> str:
        """The name to display."""
        return f"{self.choice.label}, {self.pairs} pairs, lr {self.learning_rate!r}, seed {self.seed}"

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on: a measure of its cost."""
        return sum(stage.steps * (stage.batch_size or 0) * task.length for stage, task in self.stages())

    def make_task(self) -> Task:
        """The task that the run trains and tests on."""
        return self._task(self.pairs, self.length)

    def stages(self) -> list[tuple[Stage, Task]]:
        """The stages of the training with their tasks: those of the curriculum, or the one that there is."""
        stages = self.curriculum or (Stage(pairs=self.pairs, steps=self.steps, length=self.length),)
        return [
            (
                dataclasses.replace(stage, batch_size=stage.batch_size or self.batch_size),
                self._task(stage.pairs, stage.length),
            )
            for stage in stages
        ]

    def _task(self, pairs: int, length: int | None) -> Task:
        return make_task(self.task, length=length, pairs=pairs, vocab_size=self.vocab_size, **self.task_options)

    def model_config(self) -> FastWeightsConfig:
        """The configuration of the model that the run trains."""
        return FastWeightsConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_heads=self.heads,
            mixer=self._mixers(),
            intermediate_size=self.intermediate_size,
            tie_word_embeddings=self.tie_word_embeddings,
            scale_residuals=self.scale_residuals,
            initializer_range=self.initializer_range,
        )

    def _mixers(self) -> Any:
        if not self.softmax_layers:
            return self.choice.entry
        return ["softmax" if layer in self.softmax_layers else self.choice.entry for layer in range(self.layers)]

    def record(self) -> dict[str, Any]:
        """The run in results and checkpoints."""
        return {**super().record(), "mixer": self.choice.record()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallExperiment(_Settings):
    """Every mixer at every number of pairs, with every learning rate and seed.

    Attributes:
        mixers: the memory layers to compare, each a name or a `MixerChoice`; their labels differ.
        pairs: the difficulties: key-value pairs in a sequence.
        learning_rates: the grid; the best one of each mixer and difficulty is reported, all are recorded.
        seeds: each seed is a separate run; the spread over them is reported.
    """

    mixers: tuple[str | MixerChoice, ...] = ("linear", "gla", "deltanet", "gdn")
    pairs: tuple[int, ...] = (4, 16)
    learning_rates: tuple[float, ...] = (5e-3, 1e-2)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curriculum:
            self._from_stages("pairs", (self.curriculum[-1].pairs,))
        for name in ("mixers", "pairs", "learning_rates", "seeds"):
            values = getattr(self, name)
            if not isinstance(values, tuple):
                raise TypeError(f"{name} must be a tuple of at least one value, got {describe_value(values)}")
            if not values:
                raise ValueError(f"{name} must be a tuple of at least one value, got ()")
            if name == "mixers":
                values = tuple(_choice(value).label for value in values)
            repeated = sorted({value for value in values if values.count(value) > 1})
            if repeated:
                remedy = "give one of them another label, NAME@LABEL in a command" if name == "mixers" else "drop one"
                raise ValueError(f"{name} must differ from each other, but {repeated[0]!r} is there twice; {remedy}")
        self.runs()  # each run checks itself

    def runs(self) -> tuple[RecallRun, ...]:
        """All runs of the grid, in the order mixer, pairs, learning rate, seed."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Settings)}
        grid = itertools.product(self.mixers, self.pairs, self.learning_rates, self.seeds)
        return tuple(
            RecallRun(mixer=mixer, pairs=pairs, learning_rate=learning_rate, seed=seed, **shared)
            for mixer, pairs, learning_rate, seed in grid
        )

    def record(self) -> dict[str, Any]:
        """The experiment in its files."""
        return {**super().record(), "mixers": [_choice(mixer).record() for mixer in self.mixers]}


def _choice(mixer: str | MixerChoice) -> MixerChoice:
    return mixer if isinstance(mixer, MixerChoice) else MixerChoice(mixer)


def _file_name(label: str) -> str:
    """The label where every file system takes it, else what it takes of it and a checksum."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "_", label)[:80]
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


def _checked_options(options: object) -> dict[str, Any]:
    """A copy of a task's options. The task checks their names and values."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            f"task_options must be a dict of options by name, got {describe_value(options)}; pass {{}} for none"
        )
    for name in ("pairs", "length", "vocab_size"):
        if name in options:
            raise ValueError(
                f"task_options must leave out {name}, which is a setting of its own; pass {name}=... instead"
            )
    return dict(options)


def _check_device(device: str) -> None:
    check_text("device", device, what="a torch device such as 'cpu' or 'cuda'")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be a torch device such as 'cpu' or 'cuda', got {device!r}") from None
    if kind == "meta":
        raise ValueError("device must be one that computes, such as 'cpu' or 'cuda', got 'meta'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: this torch build sees no CUDA device; use 'cpu'")
