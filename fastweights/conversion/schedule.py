"""How training goes on after a conversion: the run file for `fastweights train`.

Palimpsa continues its converted models at one tenth of the peak learning rate they were trained with, after a warm-up of 200
steps, with cosine decay (section 3.3 and the appendix on language modelling). Its peaks are 3e-3 at 170M and 1.25e-3 at 760M
parameters. Preconditioned DeltaNet and Gated KalmaNet train from scratch only; the same schedule serves them.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["run_file", "usual_peak"]

WARMUP_STEPS = 200
NO_TOKENIZER = """\
# The source had no tokenizer beside it. Name the one it was trained with:
# [tokenizer]
# path = "..."
"""


def usual_peak(parameters: int) -> float:
    """The paper's peak learning rate for a model of about this size."""
    return 3e-3 if parameters < 400_000_000 else 1.25e-3


def run_file(folder: Path, *, peak: float, steps: int, tokenizer: bool) -> str:
    """A run file (TOML) that continues the model in `folder`.

    Args:
        peak: learning rate that the source was trained with, at its highest.
        steps: of the training that follows; at most a tenth of them are warm-up.
        tokenizer: whether the folder has one.
    """
    place = folder.resolve()
    missing = "" if tokenizer else NO_TOKENIZER
    return f"""\
# Continues the converted model: fastweights train {place.name}/train.toml
# A tenth of the peak learning rate that its source was trained with, {peak:g}, and a short warm-up.
output = {json.dumps(str(place.with_name(place.name + "-trained")))}
max_steps = {steps}
learning_rate = {peak / 10:g}
warmup_fraction = {min(WARMUP_STEPS / steps, 0.1):g}

[model]
path = {json.dumps(str(place))}

# The text is that of this machine's Python installation unless a [corpus] says otherwise.
{missing}"""
