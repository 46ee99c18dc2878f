"""What the card of a trained model says about its training. Paths of this machine are left out: a card is published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._version import __version__
from .run import LanguageRun

__all__ = ["training_facts"]


def training_facts(run: LanguageRun, curves: Mapping[str, Any], *, tokens: int) -> dict[str, str]:
    """The facts of a training, by what a reader looks for. curves: the points of its log, see `loss_curves`."""
    facts = {
        "Text": _text(run),
        "Steps": f"{run.max_steps:,}",
        "Tokens read": f"{tokens:,}, in rows of {run.length:,}",
        "Optimizer": f"AdamW, weight decay {run.weight_decay:g}, beta {run.beta1:g} and {run.beta2:g}",
        "Learning rate": f"{run.learning_rate:g} at its highest, warm-up over {run.warmup_fraction:g} of the steps, then cosine "
        f"decay to {run.final_fraction:g} of it",
        "Precision": {"no": "float32"}.get(run.precision, run.precision),
        "Seed": f"{run.seed}",
    }
    if "path" in run.model:
        facts["Continued from"] = Path(str(run.model["path"])).name
    if curves["held_out_losses"]:
        facts["Held-out loss"] = f"{curves['held_out_losses'][-1]:.4f} nats per token"
    return facts | {"Trained with": f"fastweights {__version__}"}


def _text(run: LanguageRun) -> str:
    corpus = run.corpus
    if corpus.dataset is not None:
        return f"the dataset {corpus.dataset}"
    names = [Path(path).name for path in corpus.paths]
    return (
        f"files of the trainer's own: {', '.join(names)}"
        if names
        else "source and documentation of a Python installation"
    )
