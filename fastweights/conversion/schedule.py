"""How training continues after a conversion: the run file for `fastweights train`.

Palimpsa continues its converted models at one tenth of the peak learning rate they were trained with, after a warm-up of 200
steps, with cosine decay (section 3.3 and the appendix on language modelling). Its peaks are 3e-3 at 170M and 1.25e-3 at 760M
parameters. Preconditioned DeltaNet and Gated KalmaNet train from scratch only; the same schedule serves them.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..checks import check_positive

__all__ = ["run_file", "trained_peak", "usual_peak"]

WARMUP_STEPS = 200
NO_TOKENIZER = """\
# The source had no tokenizer beside it. Name the one it was trained with:
# [tokenizer]
# path = "..."
"""


def usual_peak(parameters: int) -> float:
    """The paper's peak learning rate for a model of about this size."""
    return 3e-3 if parameters < 400_000_000 else 1.25e-3


def trained_peak(source: str) -> float | None:
    """The peak learning rate of the training run whose folder model/ is `source`; None where there is no such run or rate."""
    place = Path(source).resolve()
    if place.name != "model":
        return None
    try:
        return check_positive("learning_rate", json.loads(place.with_name("run.json").read_bytes())["learning_rate"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run_file(folder: Path, *, peak: float | None, parameters: int, steps: int, tokenizer: bool) -> str:
    """A run file (TOML) that continues the model in `folder`.

    Args:
        peak: learning rate that the source was trained with, at its highest; the paper's for its size when None.
        parameters: how many numbers the model has.
        steps: of the training that follows; at most a tenth of them are warm-up.
        tokenizer: whether the folder has one.
    """
    place = folder.resolve()
    whose = "that its source was trained with" if peak is not None else "of the papers for a model of its size"
    peak = usual_peak(parameters) if peak is None else peak
    missing = "" if tokenizer else NO_TOKENIZER
    return f"""\
# Continues the converted model in this folder, when it is given to `fastweights train`.
# A tenth of the peak learning rate {whose}, {peak:g}, and a short warm-up.
output = {_quoted(place.with_name(place.name + "-trained"))}
max_steps = {steps}
learning_rate = {peak / 10:g}
warmup_fraction = {min(WARMUP_STEPS / steps, 0.1):g}

[model]
path = {_quoted(place)}

# The text is that of this machine's Python installation unless a [corpus] says otherwise.
{missing}"""


def _quoted(path: Path) -> str:
    """As TOML writes it: JSON's strings, but for characters beyond 16 bits, and with DEL escaped."""
    return json.dumps(str(path), ensure_ascii=False).replace("\x7f", "\\u007f")
