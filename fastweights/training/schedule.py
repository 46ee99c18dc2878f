"""The learning rate's schedule: linear warm-up, then cosine decay to a fraction of the peak."""

import math

__all__ = ["learning_rate_factor"]


def learning_rate_factor(step: int, *, steps: int, warmup_steps: int, final: float) -> float:
    """The factor on the peak learning rate at optimizer step `step`, counted from 0.

    It rises linearly and reaches 1 at step `warmup_steps`, then follows half a cosine that would reach `final` at step
    `steps`. A pure function of the step, so that a resumed run needs no scheduler state.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
