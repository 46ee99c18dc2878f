"""Weight decay and learning rate: which parameters decay or learn at a rate of their own, and the schedule over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..checks import check_choice, check_number, check_positive, check_size, check_texts, check_whole_number, closest
from ..kinds import checked
from ..layers.weight_decay import undecayed_parameters

__all__ = [
    "DECAY_SHAPES",
    "SCHEDULES",
    "ParameterGroup",
    "WeightDecayMixin",
    "check_optimization",
    "choose_trained",
    "learning_rate_factor",
    "undecayed_parameters",
    "weight_decay_groups",
]

SCHEDULES = ("cosine", "linear", "wsd", "constant")  # of the learning rate after the warm-up
# Of the factor that falls from 1 to 0 while p rises from 0 to 1. "sqrt" is that of Haegele et al. 2024.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
}


def check_optimization(settings: Any) -> None:
    """Refuses values of the optimizer's settings that recall and text training share."""
    for name in ("warmup_fraction", "warmup_start", "final_fraction"):
        check_number(name, getattr(settings, name), low=0, high=1)
    for name in ("beta1", "beta2"):
        check_number(name, getattr(settings, name), low=0, below=1)
    check_number("weight_decay", settings.weight_decay, low=0)
    check_positive("max_gradient_norm", settings.max_gradient_norm)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with a weight decay or a learning rate of their own.

    Attributes:
        parameters: their names in the model, or patterns of names such as "*.q_proj.weight".
        weight_decay: of all of them; None leaves norms, biases and decay parameters out and decays the others as usual.
        learning_rate: the peak; None for that of the run. The schedule is that of the run.

    Raises:
        ValueError: no name, or a number that does not fit.
        TypeError: a value of a wrong kind.
    """

    parameters: tuple[str, ...]
    weight_decay: float | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        given = (self.parameters,) if isinstance(self.parameters, str) else self.parameters
        names = check_texts("parameters", given, what="names of parameters", empty=False)
        if not names:
            raise ValueError('parameters must name at least one, such as "*.q_proj.weight", got none')
        object.__setattr__(self, "parameters", names)
        if self.weight_decay is not None:
            check_number("weight_decay of a group", self.weight_decay, low=0)
        if self.learning_rate is not None:
            check_positive("learning_rate of a group", self.learning_rate)

    def holds(self, name: str) -> bool:
        """Whether the parameter of this name is in the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


@checked
def weight_decay_groups(
    model: nn.Module, weight_decay: float, groups: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: matrices decay; norms, biases and `undecayed_parameters` do not. Parameters that
    do not train are left out, shared ones come once.

    Args:
        groups: parameters with a weight decay or a learning rate of their own; the first that holds a parameter counts. They
            follow the two groups of all other parameters.

    Raises:
        ValueError: a negative weight_decay, or a name or pattern in `groups` that no parameter of the model has.
        TypeError: model is no module.
    """
    undecayed = undecayed_parameters(model)
    check_number("weight_decay", weight_decay, low=0)
    found: dict[tuple[int, bool], list[nn.Parameter]] = {(-1, True): [], (-1, False): []}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for pattern in (pattern for group in groups for pattern in group.parameters):
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            examples = ", ".join(name for name, _ in named[:3])
            raise ValueError(f"groups must name parameters of the model, none is {pattern!r}; it has {examples}, ...")
    for name, parameter in named:
        number = next((number for number, group in enumerate(groups) if group.holds(name)), -1)
        decays = parameter.ndim >= 2 and name not in undecayed
        decays = decays or (number >= 0 and groups[number].weight_decay is not None)
        found.setdefault((number, decays), []).append(parameter)
    made = []
    for (number, decays), parameters in sorted(found.items(), key=lambda entry: (entry[0][0], not entry[0][1])):
        own = groups[number] if number >= 0 else ParameterGroup(parameters=("*",))
        rate = {} if own.learning_rate is None else {"lr": own.learning_rate}
        decay = weight_decay if own.weight_decay is None else own.weight_decay
        made.append({"params": parameters, "weight_decay": decay if decays else 0.0, **rate})
    return made


def choose_trained(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters of `model` but those that one of the names or patterns holds, such as "*.q_proj.weight". Without
    patterns nothing changes.

    Raises:
        ValueError: a pattern that no parameter has. Nothing has changed.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"train must name parameters of the model, none is {pattern!r}{closest(pattern, names)}; it has "
                f"{', '.join(names[:3])}, ..."
            )
    for name, parameter in model.named_parameters() if patterns else ():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


class WeightDecayMixin:
    """For transformers' Trainer and its subclasses where they train a module of your own with layers of this library: they know
    norms and biases by their names and no mark of a parameter. `class MyTrainer(WeightDecayMixin, Trainer)` leaves
    `undecayed_parameters` alone too, as every Trainer does in the models of this library."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """transformers' hook: names of the parameters that decay."""
        undecayed = undecayed_parameters(model)
        names = super().get_decay_parameter_names(model)  # type: ignore[misc]
        return [name for name in names if name not in undecayed]


def learning_rate_factor(
    step: int,
    *,
    steps: int,
    warmup_steps: int,
    final: float,
    start: float = 0.0,
    schedule: str = "cosine",
    decay_fraction: float = 0.1,
    decay_shape: str = "linear",
) -> float:
    """The factor on the peak learning rate at optimizer step `step`, counted from 0.

    It rises linearly and reaches 1 at step `warmup_steps`, then follows the schedule, which would reach `final` at step `steps`:
    half a cosine, a line ("linear"), or 1 up to a decay over the last part of the steps (warmup-stable-decay, "wsd"; Hu et al.
    2024). With "constant" it stays at 1. The first step has `start`, or where that is 0 the first of `warmup_steps` + 1 equal
    parts, as a step with factor 0 would do nothing. It depends on the step alone, so a resumed run needs no scheduler state.

    Args:
        decay_fraction: part of the steps that "wsd" decays over.
        decay_shape: of that decay, "linear", "cosine" or "sqrt", 1 - sqrt(p) after the part p of it.

    Raises:
        ValueError, TypeError: a number that does not fit.
    """
    check_whole_number("step", step)
    check_size("steps", steps)
    check_whole_number("warmup_steps", warmup_steps)
    check_number("final", final, low=0)
    check_number("start", start, low=0)
    check_choice("schedule", schedule, SCHEDULES)
    check_number("decay_fraction", decay_fraction, low=0, high=1)
    check_choice("decay_shape", decay_shape, DECAY_SHAPES)
    if step < warmup_steps:
        return start + (1 - start) * step / warmup_steps if start else (step + 1) / (warmup_steps + 1)
    begin, shape = warmup_steps, schedule
    if schedule == "wsd":
        begin, shape = max(warmup_steps, steps - round(decay_fraction * steps)), decay_shape
    if schedule == "constant" or step < begin:
        return 1.0
    progress = min(1.0, (step - begin) / max(1, steps - begin))
    return final + (1 - final) * DECAY_SHAPES[shape](progress)
