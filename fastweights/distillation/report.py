"""The end of a distillation: teacher and student measured on the same text, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import tee
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from ..checks import check_choice
from ..environment import machine, versions
from ..evaluation.causal_models import state_size
from ..evaluation.evaluate import EvaluationSettings, evaluate
from ..evaluation.ruler import NEEDLE_TASKS
from ..kinds import checked
from ..outputs import check_file, has_keys
from ..results.distillation import Distillation, ModelMeasures, save_distillation
from ..training.folder import as_stored
from .held_out import HeldOutKL, Rows
from .progress import MeasuringProgress

__all__ = ["REPORT", "compare_models", "is_report"]

REPORT = "distillation.json"  # its name in a folder
PERPLEXITY = "perplexity"
MEASURES = (PERPLEXITY, *NEEDLE_TASKS)


@checked
def compare_models(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: Any,
    *,
    settings: EvaluationSettings,
    rows: Rows,
    documents: Iterable[Any] = (),
    text: str | None = None,
    curve: Sequence[tuple[int, float]] = (),
    output: Path | None = None,
    console: Console | None = None,
) -> Distillation:
    """Measures a student and its teacher: held-out KL(teacher || student), perplexity by length, needles, size of the cache.

    Args:
        student, teacher: causal language models with one tokenizer, on one device.
        settings: `measures` among "perplexity" and the needle tasks, with their lengths.
        rows: held-out text for the divergence, rows of one length, as `rank_layers` takes them; all are read,
            `settings.batch_size` at a time.
        documents: token ids of held-out text for the perplexity, a document each.
        text: what needles are hidden in; Python's language reference when None.
        curve: the held-out KL during training, by the tokens read, which the result keeps.
        output: folder for distillation.json. None writes nothing.
        console: shows the progress; None for none.

    Raises:
        ValueError: another measure, a length that no needle fits into, too little text, vocabularies of different sizes, results
            that are not finite, or an output folder with another file of this name.
    """
    for measure in settings.measures:
        check_choice("a measure of a distillation", measure, MEASURES)
    path = None if output is None else output / REPORT
    if path is not None:
        check_file("output", path, is_report, "distillation")
    models = {"teacher": teacher, "student": student}
    texts = dict(zip(models, tee(documents), strict=True))
    measurements = {  # whose arguments are checked here
        name: evaluate(model, tokenizer, settings, documents=texts[name], text=text) for name, model in models.items()
    }
    lengths = sorted(set(settings.lengths))
    per_model = sum(1 if measure == PERPLEXITY else len(lengths) for measure in settings.measures)
    measured: dict[str, ModelMeasures] = {}
    with MeasuringProgress(console, "teacher and student", total=1 + 2 * per_model) as progress:
        divergence = HeldOutKL(teacher, rows, batch_size=settings.batch_size)
        held_out_kl = divergence(student)
        progress.end(f"KL {held_out_kl:.4f}")
        for name, model in models.items():
            found: dict[str, list[Any]] = {measure: [] for measure in settings.measures}
            for measure, results in measurements[name]:
                found[measure] += results
                progress.end(f"{measure} of the {name}")
            measured[name] = ModelMeasures(
                parameters=model.num_parameters(),
                state_sizes={str(length): state_size(model, length) for length in lengths},
                perplexities=found.pop(PERPLEXITY, []),
                needles=[row for results in found.values() for row in results],
            )
    result = Distillation(
        held_out_kl=held_out_kl,
        held_out_tokens=divergence.tokens,
        kl_tokens=[tokens for tokens, _ in curve],
        kls=[kl for _, kl in curve],
        **measured,
        settings=as_stored(dataclasses.asdict(settings)),
        versions=versions(),
        machine=machine(str(student.device)),
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_distillation(path, result)
    return result


def is_report(path: Path) -> bool:
    """Whether a file is one that `compare_models` wrote."""
    return has_keys(path, "format", "held_out_kl", "teacher", "student")
