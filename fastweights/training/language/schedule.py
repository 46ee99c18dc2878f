"""The schedule of a training of language models: what a step reads, how many steps there are, and at which rate they learn."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...checks import (
    LARGEST_COUNT,
    check_choice,
    check_list,
    check_number,
    check_positive,
    check_size,
    check_tokens,
    describe_value,
)
from ..optimization import (
    DECAY_SHAPES,
    SCHEDULES,
    ParameterGroup,
    check_optimization,
    learning_rate_factor,
)

__all__ = ["BatchStage", "Schedule", "StepPlan", "reset_alternatives"]

OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}
SET_BY_FIELDS = {"params", "lr", "betas", "weight_decay", "fused"}  # of these optimizers' arguments
# Beyond these the rows of a step would fill the memory, or a training would never end.
LARGEST = {
    "length": 2**24,
    "batch_size": 2**20,
    "accumulation": 2**20,
    "context_parallel": 2**16,
    "max_steps": 10**9,
}
# Fields that say the same: only one of each may be set.
ALTERNATIVES = (
    ("max_steps", "max_tokens"),
    ("warmup_fraction", "warmup_steps", "warmup_tokens"),
    ("final_fraction", "final_learning_rate"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchStage:
    """The first steps of a training, with a batch of another size.

    Attributes:
        batch_size: rows that a process, or a group of context_parallel processes, reads at a time in these steps.
        steps: how many they are; or
        tokens: the fewest steps that read at least this many.
    """

    batch_size: int
    steps: int | None = None
    tokens: int | str | None = None

    def __post_init__(self) -> None:
        check_size("batch_size of batch_ramp", self.batch_size, high=LARGEST["batch_size"])
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("an entry of batch_ramp must have either steps or tokens; give one of them")
        if self.steps is not None:
            check_size("steps of batch_ramp", self.steps, high=LARGEST["max_steps"])
        else:
            object.__setattr__(self, "tokens", check_tokens("tokens of batch_ramp", self.tokens))


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Which rows every step reads. Rows and tokens are those of all processes together.

    Attributes:
        parts: of steps that follow each other: how many they are, and the rows of one pass of one context group.
        passes: of a step, over all context groups.
        length: tokens of a row.
    """

    parts: tuple[tuple[int, int], ...]
    passes: int
    length: int

    @property
    def steps(self) -> int:
        return sum(steps for steps, _ in self.parts)

    def rows(self, steps: int) -> int:
        """Rows read in the first `steps` steps."""
        total = 0
        for count, size in self.parts:
            total += min(count, steps) * size * self.passes
            steps -= min(count, steps)
        return total + steps * self.parts[-1][1] * self.passes

    def tokens(self, steps: int) -> int:
        """Tokens read in the first `steps` steps."""
        return self.rows(steps) * self.length

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that read at least this many tokens; behind the last step more would follow like it."""
        taken = 0
        for number, (count, size) in enumerate(self.parts, 1):
            needed = -(-tokens // (size * self.passes * self.length))
            if needed <= count or number == len(self.parts):
                return taken + max(needed, 0)
            taken, tokens = taken + count, tokens - count * size * self.passes * self.length
        return taken

    def __len__(self) -> int:
        """Batches of one pass and context group."""
        return self.steps * self.passes

    def __iter__(self) -> Iterator[list[int]]:
        """Batch by batch the numbers of its rows: context group p of n takes batches p, p + n, p + 2 n."""
        row = 0
        for count, size in self.parts:
            for _ in range(count * self.passes):
                yield list(range(row, row + size))
                row += size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Those fields of `LanguageRun` that say what a step reads and learns; its docstring describes them."""

    length: int = 1024
    batch_size: int = 8
    accumulation: int = 1
    context_parallel: int = 1
    batch_ramp: tuple[BatchStage, ...] = ()
    max_steps: int = 1000
    max_tokens: int | str | None = None
    learning_rate: float = 1e-3
    warmup_fraction: float = 0.05
    warmup_steps: int | None = None
    warmup_tokens: int | str | None = None
    warmup_start: float = 0.0
    schedule: str = "cosine"
    schedule_tokens: int | str | None = None
    decay_fraction: float = 0.1
    decay_shape: str = "linear"
    final_fraction: float = 0.1
    final_learning_rate: float | None = None
    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.1
    groups: tuple[ParameterGroup, ...] = ()
    beta1: float = 0.9
    beta2: float = 0.95
    max_gradient_norm: float = 1.0

    def check_schedule(self) -> None:
        """Refuse values that do not fit."""
        for name, largest in LARGEST.items():
            object.__setattr__(self, name, check_size(name, getattr(self, name), high=largest))
        if self.length < 2:
            raise ValueError(
                f"length must be at least 2 tokens, of which the first predicts the next, got {self.length}"
            )
        check_positive("learning_rate", self.learning_rate)
        check_optimization(self)
        for name in ("max_tokens", "warmup_tokens", "schedule_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_tokens(name, getattr(self, name)))
        if self.warmup_steps is not None:
            check_size("warmup_steps", self.warmup_steps, high=LARGEST_COUNT)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_number("decay_fraction", self.decay_fraction, above=0, high=1)
        check_choice("decay_shape", self.decay_shape, DECAY_SHAPES)
        if self.final_learning_rate is not None:
            check_number("final_learning_rate", self.final_learning_rate, low=0, high=self.learning_rate)
        defaults = {field.name: field.default for field in dataclasses.fields(Schedule)}
        for names in ALTERNATIVES:
            given = [name for name in names if getattr(self, name) != defaults[name]]
            if len(given) > 1:
                raise ValueError(
                    f"only one of {', '.join(names)} may be set, got {' and '.join(given)}; drop the others"
                )
        for name, kind, what in (
            ("batch_ramp", BatchStage, "BatchStage (tables [[batch_ramp]] in a run file)"),
            ("groups", ParameterGroup, "ParameterGroup (tables [[groups]] in a run file)"),
        ):
            object.__setattr__(self, name, check_list(name, getattr(self, name), what, kind))
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if not isinstance(self.optimizer_options, Mapping):
            raise TypeError(f"optimizer_options must be a table, got {describe_value(self.optimizer_options)}")
        known = sorted(set(inspect.signature(OPTIMIZERS[self.optimizer]).parameters) - SET_BY_FIELDS)
        for name in self.optimizer_options:
            check_choice("a key of optimizer_options", name, known)

    def context_groups(self, processes: int) -> int:
        """How many context groups so many processes make: each reads rows of its own.

        Raises:
            ValueError: context_parallel does not divide the number of processes.
        """
        if processes % self.context_parallel:
            raise ValueError(
                f"context_parallel must divide the number of processes, {processes}, got {self.context_parallel}: every row is "
                f"read by {self.context_parallel} processes together; start a multiple of them with torchrun "
                f"--nproc-per-node, plan for them with --dry-run --gpu {self.context_parallel}xNAME, or set context_parallel = 1"
            )
        return processes // self.context_parallel

    def plan(self, processes: int) -> StepPlan:
        """The steps of a training in so many processes.

        Raises:
            ValueError: a batch_ramp that does not end before the training does; or as `context_groups`.
        """
        passes, parts = self.accumulation * self.context_groups(processes), [(0, self.batch_size)]
        for stage in self.batch_ramp:
            alone = StepPlan(((0, stage.batch_size),), passes, self.length)
            parts.insert(-1, (stage.steps or alone.steps_for(int(stage.tokens or 0)), stage.batch_size))
        ramp = StepPlan(tuple(parts), passes, self.length)
        steps = self.max_steps if self.max_tokens is None else ramp.steps_for(int(self.max_tokens))
        if self.batch_ramp and steps <= ramp.steps:
            raise ValueError(
                f"batch_ramp must end before the training, which has {steps:,} steps, got {ramp.steps:,}; make it shorter"
            )
        return StepPlan((*ramp.parts[:-1], (steps - ramp.steps, self.batch_size)), passes, self.length)

    def warmup(self, plan: StepPlan) -> int:
        """Steps of the warm-up."""
        if self.warmup_tokens is not None:
            return plan.steps_for(int(self.warmup_tokens))
        return round(self.warmup_fraction * plan.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def final(self) -> float:
        """The learning rate at the end of the schedule, as a part of the peak."""
        return (
            self.final_fraction if self.final_learning_rate is None else self.final_learning_rate / self.learning_rate
        )

    def rate_factor(self, step: int, plan: StepPlan) -> float:
        """The factor on the peak learning rate at a step, counted from 0."""
        span = plan.steps if self.schedule_tokens is None else plan.steps_for(int(self.schedule_tokens))
        return learning_rate_factor(
            step,
            steps=span,
            warmup_steps=self.warmup(plan),
            final=self.final,
            start=self.warmup_start,
            schedule=self.schedule,
            decay_fraction=self.decay_fraction,
            decay_shape=self.decay_shape,
        )

    def describe_rate(self, plan: StepPlan) -> str:
        """The learning rate over the steps, in words."""
        shape = {
            "constant": "then constant",
            "wsd": f"constant up to a {self.decay_shape} decay over the last {self.decay_fraction:g} to {self.final:g} of it",
        }.get(self.schedule, f"then {self.schedule} decay to {self.final:g} of it")
        span = "" if self.schedule_tokens is None else f" after {self.schedule_tokens:,} tokens"
        return f"{self.learning_rate:g} at its highest, warm-up over {self.warmup(plan):,} steps, {shape}{span}"


def reset_alternatives(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the fields that say the same as those of `changes`."""
    defaults = {field.name: field.default for field in dataclasses.fields(Schedule)}
    return {
        other: defaults[other] for names in ALTERNATIVES if any(name in changes for name in names) for other in names
    }
