"""A recall experiment: one run, and the grid of runs to compare. Frozen, checked when created."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from ...checks import check_list, check_positive, check_size, check_whole_number
from ...data import Task, make_task
from ...files import file_name
from ...layers import MixerChoice, in_block
from ...models import FastWeightsConfig
from .settings import Settings, Stage

__all__ = ["RecallExperiment", "RecallRun"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallRun(Settings):
    """One model, trained once.

    Attributes:
        mixer: the memory layer, a key of `fastweights.layers.MIXERS`, or a `MixerChoice` with options and a label, also as text.
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
        for kind in ("curriculum", "mixture"):
            stages = getattr(self, kind)
            if stages and self.pairs != stages[-1].pairs:
                raise ValueError(f"pairs must be that of the {kind}'s last stage, {stages[-1].pairs}, got {self.pairs}")
        self.stages()  # the tasks check themselves
        self.model_config()

    @property
    def choice(self) -> MixerChoice:
        """Name, options and label of the memory layer."""
        return MixerChoice.of(self.mixer)

    @property
    def name(self) -> str:
        """A name that no other run of the experiment has; valid as a file name."""
        return f"{file_name(self.choice.label)}-pairs{self.pairs}-lr{self.learning_rate!r}-seed{self.seed}"

    @property
    def title(self) -> str:
        """The name to display."""
        return f"{self.choice.label}, {self.pairs} pairs, lr {self.learning_rate!r}, seed {self.seed}"

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on: a measure of its cost."""
        once = sum(stage.steps * (stage.batch_size or 0) * task.length for stage, task in self.stages())
        return once if not self.mixture else once * self.steps // sum(stage.steps for stage in self.mixture)

    def make_task(self) -> Task:
        """The task that the run trains and tests on."""
        return self._task(self.pairs, self.length)

    def stages(self) -> list[tuple[Stage, Task]]:
        """The stages of the training with their tasks: those of the curriculum, of a round of the mixture, or the one that there
        is."""
        stages = self.curriculum or self.mixture or (Stage(pairs=self.pairs, steps=self.steps, length=self.length),)
        return [
            (
                dataclasses.replace(stage, batch_size=stage.batch_size or self.batch_size),
                self._task(stage.pairs, stage.length),
            )
            for stage in stages
        ]

    def stage_at(self, step: int) -> int:
        """The number of the stage that trains after `step` steps."""
        ends = list(itertools.accumulate(stage.steps for stage, _ in self.stages()))
        return bisect.bisect_right(ends, step % ends[-1] if self.mixture else step)

    def _task(self, pairs: int, length: int | None) -> Task:
        return make_task(self.task, length=length, pairs=pairs, vocab_size=self.vocab_size, **self.task_options)

    def model_config(self) -> FastWeightsConfig:
        """The configuration of the model that the run trains."""
        mixer, attention = (in_block(x, self.block, self.heads) for x in (self.choice, MixerChoice("softmax")))
        return FastWeightsConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_heads=self.heads,
            mixer=mixer.entry,
            softmax_layers=self.softmax_layers,
            softmax_options=dict(attention.options) if self.softmax_layers and attention.options else None,
            intermediate_size=self.intermediate_size,
            tie_word_embeddings=self.tie_word_embeddings,
            scale_residuals=self.scale_residuals,
            initializer_range=self.initializer_range,
        )

    def record(self) -> dict[str, Any]:
        """The run in results and checkpoints."""
        return {**super().record(), "mixer": self.choice.record()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallExperiment(Settings):
    """Every mixer at every number of pairs, with every learning rate and seed.

    Attributes:
        mixers: the memory layers to compare, each a name, a text such as "gka:ridge=0.01@a", or a `MixerChoice` or its fields as
            a table; their labels differ.
        pairs: the difficulties: key-value pairs in a sequence.
        learning_rates: the grid; the best one of each mixer and difficulty is reported, all are recorded.
        seeds: each seed is a separate run; the spread over them is reported.
    """

    mixers: tuple[str | MixerChoice, ...] = ("linear", "gla", "deltanet", "gdn")
    pairs: tuple[int, ...] = (4, 16)
    learning_rates: tuple[float, ...] = (3e-3, 1e-2)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, check in _GRID.items():
            values = check_list(name, getattr(self, name), "at least one value")
            if not values:
                raise ValueError(f"{name} must be a list of at least one value, got []")
            if name == "mixers":
                values = tuple(one if isinstance(one, MixerChoice) else MixerChoice.of(one).short for one in values)
            object.__setattr__(self, name, values)
            checked = [check(name, value) for value in values]
            repeated = sorted({value for value in checked if checked.count(value) > 1})
            if repeated:
                remedy = "give one of them another label, NAME@LABEL in a command" if name == "mixers" else "drop one"
                raise ValueError(f"{name} must differ from each other, but {repeated[0]!r} is there twice; {remedy}")
        if stages := self.curriculum or self.mixture:
            self._set_from_stages("pairs", (stages[-1].pairs,))
        self.runs()  # each run checks itself

    def runs(self) -> tuple[RecallRun, ...]:
        """All runs of the grid, in the order mixer, pairs, learning rate, seed."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}
        grid = itertools.product(self.mixers, self.pairs, self.learning_rates, self.seeds)
        return tuple(
            RecallRun(mixer=mixer, pairs=pairs, learning_rate=learning_rate, seed=seed, **shared)
            for mixer, pairs, learning_rate, seed in grid
        )

    def record(self) -> dict[str, Any]:
        """The experiment in its files."""
        return {**super().record(), "mixers": [MixerChoice.of(mixer).record() for mixer in self.mixers]}


# What each value of the grid must be.
_GRID: dict[str, Callable[[str, Any], Any]] = {
    "mixers": lambda name, value: MixerChoice.of(value).label,
    "pairs": check_size,
    "learning_rates": check_positive,
    "seeds": check_whole_number,
}
