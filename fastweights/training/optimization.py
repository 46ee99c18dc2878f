"""Weight decay and learning rate: which parameters decay, and the schedule over the steps."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ..checks import check_choice, check_number, check_positive, check_size, check_whole_number
from ..kinds import checked
from ..layers.weight_decay import undecayed_parameters

__all__ = [
    "SCHEDULES",
    "WeightDecayMixin",
    "check_optimization",
    "learning_rate_factor",
    "undecayed_parameters",
    "weight_decay_groups",
]

SCHEDULES = ("cosine", "constant")  # of the learning rate after the warm-up


def check_optimization(settings: Any) -> None:
    """Refuses values of the optimizer's settings that recall and text training share."""
    for name in ("warmup_fraction", "warmup_start", "final_fraction"):
        check_number(name, getattr(settings, name), low=0, high=1)
    for name in ("beta1", "beta2"):
        check_number(name, getattr(settings, name), low=0, below=1)
    check_number("weight_decay", settings.weight_decay, low=0)
    check_positive("max_gradient_norm", settings.max_gradient_norm)


@checked
def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: matrices decay; norms, biases and `undecayed_parameters` do not. Parameters that
    do not train are left out, shared ones come once.

    Raises:
        ValueError: a negative weight_decay.
        TypeError: model is no module.
    """
    undecayed = undecayed_parameters(model)
    check_number("weight_decay", weight_decay, low=0)
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (kept if parameter.ndim < 2 or name in undecayed else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


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
    step: int, *, steps: int, warmup_steps: int, final: float, start: float = 0.0, schedule: str = "cosine"
) -> float:
    """The factor on the peak learning rate at optimizer step `step`, counted from 0.

    It rises linearly and reaches 1 at step `warmup_steps`, then follows half a cosine that would reach `final` at step
    `steps`, or stays at 1 with schedule "constant". The first step has `start`, or where that is 0 the first of
    `warmup_steps` + 1 equal parts, as a step with factor 0 would do nothing. It depends on the step alone, so a resumed run
    needs no scheduler state.

    Raises:
        ValueError, TypeError: a number that does not fit.
    """
    check_whole_number("step", step)
    check_size("steps", steps)
    check_whole_number("warmup_steps", warmup_steps)
    check_number("final", final, low=0)
    check_number("start", start, low=0)
    check_choice("schedule", schedule, SCHEDULES)
    if step < warmup_steps:
        return start + (1 - start) * step / warmup_steps if start else (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
