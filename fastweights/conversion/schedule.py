"""How training continues after a conversion: the run file for `fastweights train`.

Palimpsa continues its converted models at one tenth of the peak learning rate they were trained with, after a warm-up of 200
steps, with cosine decay (section 3.3 and the appendix on language modelling). Its peaks are 3e-3 at 170M and 1.25e-3 at 760M
parameters. Preconditioned DeltaNet and Gated KalmaNet train from scratch only; the same schedule serves them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .training import RecordedTraining

__all__ = ["run_file", "usual_peak"]

WARMUP_STEPS = 200
NO_TOKENIZER = """\
# The source had no tokenizer beside it. Name the one it was trained with:
# [tokenizer]
# path = "..."
"""
DEFAULT_TEXT = """\
# The text is that of this machine's Python installation unless a [corpus] says otherwise.
"""


def usual_peak(parameters: int) -> float:
    """The paper's peak learning rate for a model of about this size."""
    return 3e-3 if parameters < 400_000_000 else 1.25e-3


def run_file(
    folder: Path,
    *,
    training: RecordedTraining,
    peak: float | None,
    parameters: int,
    steps: int,
    tokenizer: bool,
) -> str:
    """A run file (TOML) that continues the model in `folder`. All paths in it are absolute.

    Args:
        training: what is recorded of the source's training; its text, tokenizer, rows and precision are kept.
        peak: learning rate that the source was trained with, at its highest; that of `training` when None, or else the paper's
            for its size.
        parameters: how many numbers the model has.
        steps: of the training that follows; at most a tenth of them are warm-up.
        tokenizer: whether the folder has one.
    """
    place = folder.resolve()
    peak = training.peak if peak is None else peak
    whose = "that its source was trained with" if peak is not None else "of the papers for a model of its size"
    peak = usual_peak(parameters) if peak is None else peak
    return "\n".join(
        [
            "# Continues the converted model in this folder, when it is given to `fastweights train`.",
            f"# A tenth of the peak learning rate {whose}, {peak:g}, and a short warm-up.",
            f"output = {_toml(str(place.with_name(place.name + '-trained')))}",
            f"max_steps = {steps}",
            f"learning_rate = {peak / 10:g}",
            f"warmup_fraction = {min(WARMUP_STEPS / steps, 0.1):g}",
            *([f"# As in {_comment(training.file)}:"] if training.file is not None and training.settings else []),
            *_lines(training.settings),
            "",
            "[model]",
            f"path = {_toml(str(place))}",
            "",
            *_corpus(training),
            *_tokenizer(training, tokenizer),
        ]
    )


def _corpus(training: RecordedTraining) -> list[str]:
    if training.corpus is None:
        return [DEFAULT_TEXT]
    missing = [f"# Not found on this machine: {_comment(path)}" for path in training.missing]
    if not training.corpus:
        return [*missing, "# The text is that of this machine's Python installation, as it was for the source.", ""]
    return [*missing, "[corpus]", *_lines(training.corpus), ""]


def _tokenizer(training: RecordedTraining, in_folder: bool) -> list[str]:
    """Nothing where the folder has one: the training takes it."""
    if in_folder:
        return []
    if training.tokenizer is None:
        return [NO_TOKENIZER]
    return ["[tokenizer]", f"path = {_toml(training.tokenizer)}", ""]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    """As TOML writes it: JSON's values, but for characters beyond 16 bits, and with DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(path: Path | str) -> str:
    """A path in a comment, where TOML has no escapes: in ASCII."""
    return json.dumps(str(path)).replace("\x7f", "\\u007f")
