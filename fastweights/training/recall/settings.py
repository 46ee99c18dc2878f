"""The settings that all runs of a recall experiment share. Frozen, checked when created."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...checks import (
    LARGEST_COUNT,
    LARGEST_DEPTH,
    LARGEST_HEADS,
    LARGEST_WIDTH,
    check_choice,
    check_device,
    check_flag,
    check_list,
    check_number,
    check_positive,
    check_size,
    check_text,
    check_whole_number,
    describe_value,
)
from ...data import RecallTask
from ...data.registry import task_class
from ...layers import BLOCKS
from ..optimization import SCHEDULES, check_optimization

__all__ = ["Settings", "Stage"]

LARGEST = {
    "vocab_size": 2**20,
    "width": LARGEST_WIDTH,
    "heads": LARGEST_HEADS,
    "layers": LARGEST_DEPTH,
    "steps": LARGEST_COUNT,
    "batch_size": 2**20,
    "test_examples": 2**24,
    "validation_examples": 2**24,
    "train_examples": 2**24,
    "evaluations": LARGEST_COUNT,
    "watch_every": LARGEST_COUNT,
}
_OPTIONAL = ("train_examples", "validation_examples", "watch_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a curriculum, or of a round of a mixture.

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
    "schedule": "cosine", "watch_every": None, "save_models": False, "mixture": [], "validation_examples": None,
    "stop_at": None, "seed_by_name": False, "block": "published",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all runs of an experiment share.

    Attributes:
        task: name of the recall task, a key of `fastweights.data.TASKS`.
        task_options: the task's own options by name, such as {"random_non_queries": False}; see the task's class.
        length: tokens in a sequence; None takes the task's own length for the number of pairs.
        vocab_size: number of different tokens; tasks of vectors have none.
        block: what every mixer has around its rule, a key of `fastweights.layers.BLOCKS`: "published" for the options of its
            layer with the decays that papers draw, "matched" for the same convolutions, gates and first windows in all. Options
            of a mixer go before those of the block.
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
        mixture: stages of different pairs that are trained in turn, each for its steps, again and again until `steps` are taken.
            pairs and length are then those of the last one. The measure is the mean over the stages; results have that of each.
        beta1, beta2: AdamW's.
        weight_decay: AdamW's decoupled weight decay, on matrices only.
        schedule: of the learning rate after the warm-up, "cosine", "linear", "wsd" (constant up to a linear decay over the last
            tenth of the steps) or "constant".
        warmup_fraction: part of `steps` over which the learning rate rises linearly to its peak.
        warmup_start: the learning rate at the first step, as a part of the peak; 0 for the first of equal parts.
        final_fraction: the learning rate at the last step, as a part of the peak (cosine decay in between).
        max_gradient_norm: the gradient is scaled down to this norm when it is larger.
        initializer_range: standard deviation of the model's first weights.
        test_examples: held-out sequences that the model is measured on.
        validation_examples: held-out sequences, others than the tested ones, that the model is measured on during a run and by
            which the learning rate is chosen. It is tested once, at the end. None to do all of this on the tested sequences.
        stop_at: a run ends before `steps` where the measure reaches this on the validation sequences of every stage.
        evaluations: how often it is measured in a run, the last time at its end.
        watch_every: steps between two looks at the model that is trained (`RecallResult.watched`), by functions of installed
            packages, the entry point group `fastweights.watches`; None for none.
        save_models: whether every trained model is kept, in runs/NAME.model of the output folder.
        seed_by_name: whether the first values of each module depend on the seed and its name alone. Models that differ in their
            mixers then begin with the same values wherever names and shapes agree; otherwise one draw more or less changes all
            that follow.
        device: torch device, "cpu", "cuda", "cuda:1".
    """

    task: str = "mqar-shuffled"
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    length: int | None = None
    vocab_size: int = 64
    block: str = "published"
    width: int = 32
    heads: int = 2
    layers: int = 2
    intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    scale_residuals: bool = True
    softmax_layers: tuple[int, ...] = ()
    steps: int = 600
    batch_size: int = 32
    train_examples: int | None = None
    curriculum: tuple[Stage, ...] = ()
    mixture: tuple[Stage, ...] = ()
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup_fraction: float = 0.1
    warmup_start: float = 0.0
    final_fraction: float = 0.1
    max_gradient_norm: float = 1.0
    initializer_range: float = 0.05
    test_examples: int = 1024
    validation_examples: int | None = None
    stop_at: float | None = None
    evaluations: int = 4
    watch_every: int | None = None
    save_models: bool = False
    seed_by_name: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        kind = task_class(self.task, "task")
        object.__setattr__(self, "task_options", _checked_options(self.task_options))
        for name, largest in LARGEST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                object.__setattr__(self, name, check_size(name, getattr(self, name), high=largest))
        if self.intermediate_size is not None:
            check_whole_number("intermediate_size", self.intermediate_size, high=LARGEST_WIDTH)
        check_optimization(self)
        self._check_layers_and_stages()
        self._check_validation()
        largest = max([self.batch_size, *(stage.batch_size or 0 for stage in self.curriculum)])
        if self.train_examples is not None and self.train_examples < largest:
            raise ValueError(
                f"train_examples must be at least batch_size, {largest}, got {self.train_examples}; raise it, or leave it out "
                "for fresh sequences in every step"
            )
        for name in ("tie_word_embeddings", "scale_residuals", "save_models", "seed_by_name"):
            check_flag(name, getattr(self, name))
        for name in ("watch_every", "save_models"):
            if getattr(self, name) and not issubclass(kind, RecallTask):
                raise ValueError(
                    f"{name} must be left out for task {self.task!r}, whose models read vectors and not tokens"
                )
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("block", self.block, BLOCKS)
        check_positive("initializer_range", self.initializer_range)
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and {self.heads} heads; change one of them"
            )
        check_device(check_text("device", self.device, what="a torch device such as 'cpu' or 'cuda'"))

    def _check_layers_and_stages(self) -> None:
        for name, kind, what in (
            ("softmax_layers", int, "layer numbers"),
            ("curriculum", Stage, "Stage (tables [[curriculum]] in a run file)"),
            ("mixture", Stage, "Stage (tables [[mixture]] in a run file)"),
        ):
            object.__setattr__(self, name, check_list(name, getattr(self, name), what, kind))
        for layer in self.softmax_layers:
            check_whole_number("softmax_layers", layer, high=self.layers - 1)
        if self.curriculum:
            last, total = self.curriculum[-1], sum(stage.steps for stage in self.curriculum)
            for name, value in (("length", last.length), ("steps", total)):
                self._set_from_stages(name, value)
        if self.mixture:
            for name in ("curriculum", "train_examples"):
                if getattr(self, name):
                    raise ValueError(f"{name} must be left out with a mixture, whose stages are read in turn")
            if len({stage.pairs for stage in self.mixture}) < len(self.mixture):
                raise ValueError("mixture must have stages of different pairs; drop one of those with the same pairs")
            self._set_from_stages("length", self.mixture[-1].length)

    def _check_validation(self) -> None:
        if self.stop_at is not None:
            check_number("stop_at", self.stop_at, low=0)
        for name in ("mixture", "stop_at"):
            if getattr(self, name) and self.validation_examples is None:
                raise ValueError(
                    f"validation_examples must be given with {name}, which is decided by the sequences of it"
                )

    def _set_from_stages(self, name: str, value: Any) -> None:
        """Set a setting that the stages decide."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        if getattr(self, name) not in (default, value):
            raise ValueError(
                f"{name} must be left out with a {'mixture' if self.mixture else 'curriculum'}, whose stages say {value}, got "
                f"{getattr(self, name)}"
            )
        object.__setattr__(self, name, value)

    def record(self) -> dict[str, Any]:
        """The settings as plain values, as files hold them. Settings of _LATER are left out at the values there, so that
        files from before there were any describe the same run."""
        values = {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}
        return {name: x for name, x in values.items() if name not in _LATER or x != _LATER[name]}


def _checked_options(options: object) -> dict[str, Any]:
    """A copy of a task's options. The task checks their names and values."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            f"task_options must be a table (in Python a dict) of options by name, got {describe_value(options)}; leave it out "
            "for none"
        )
    for name in ("pairs", "length", "vocab_size"):
        if name in options:
            raise ValueError(f"task_options must leave out {name}, which is a setting of its own; set {name} instead")
    return dict(options)
