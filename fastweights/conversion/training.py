"""Training before and after a conversion: what is recorded of the source's text, tokenizer, rows, precision and learning
rate, and the run file by which `fastweights train` continues.

Palimpsa continues its converted models at one tenth of the peak learning rate they were trained with, after a warm-up of 200
steps, with cosine decay (section 3.3 and the appendix on language modelling). Its peaks are 3e-3 at 170M and 1.25e-3 at 760M
parameters. Preconditioned DeltaNet and Gated KalmaNet train from scratch only; the same schedule serves them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..checks import check_positive, check_size
from ..data.text import TextCorpus, TextSource, TextTokenizer
from ..results.language import training_record
from ..untrusted import check_file, one_line, read_json_object

__all__ = ["RecordedTraining", "distillation_file", "recorded_training", "run_file", "usual_peak"]

Source = TypeVar("Source", bound=TextSource)
# Fields of LanguageRun, beside corpus and tokenizer, that the training of the converted model keeps. The rest belongs to the
# model, to its schedule or to measurements.
SETTINGS = (
    *("length", "batch_size", "accumulation", "weight_decay", "beta1", "beta2", "max_gradient_norm"),
    *("precision", "gradient_checkpointing"),
)


@dataclass(frozen=True, kw_only=True)
class RecordedTraining:
    """The settings of a training that the training of a converted model takes over, with absolute paths.

    Attributes:
        file: where they were found; None where nothing is recorded, and all else is empty.
        peak: the peak learning rate of the source's own training.
        settings: fields of `LanguageRun` by name.
        corpus: those fields of `TextCorpus` that are not its defaults; None where no corpus is recorded.
        tokenizer: path of the tokenizer, where one is named.
        missing: paths that do not exist on this machine.
    """

    file: Path | None = None
    peak: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    corpus: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    missing: tuple[str, ...] = ()


def recorded_training(folder: Path, output: Path) -> RecordedTraining:
    """From run.json of the training that the model in `folder` comes from, or from the train.toml beside it, which an earlier
    conversion wrote. Folders of models, of the source and `output`, are left out of the text. Whether to run code of the
    tokenizer's folder is never taken over: the record may be a stranger's.

    Raises:
        ValueError: the file is damaged.
    """
    run, train = training_record(folder), folder.resolve() / "train.toml"
    file = run if run is not None else train if train.exists() else None
    if file is None:
        return RecordedTraining()
    try:
        record = _read_toml(file) if run is None else read_json_object(file)
        return _read_record(file, record, (file.parent, folder.resolve(), output.resolve()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} must say how the source was trained, but it is damaged: {one_line(error)}; delete it to convert without it"
        ) from None


def _read_record(file: Path, record: Mapping[str, Any], models: tuple[Path, ...]) -> RecordedTraining:
    paths = _Paths(_find_start(file), file.parent)
    corpus = None
    if "corpus" in record:
        given = TextCorpus(**record["corpus"])
        there = paths.absolute_corpus(given, sources=tuple(paths.absolute_corpus(source) for source in given.sources))
        read = [Path(path).resolve() for single in there.singles for path in single.paths]
        outputs = [str(path) for path in models if any(path.is_relative_to(place) for place in read)]
        corpus = _write_changes(
            dataclasses.replace(there, excluded=tuple(dict.fromkeys([*there.excluded, *outputs])), sources=())
        )
        if there.sources:
            corpus["sources"] = [_write_changes(source) for source in there.sources]
    named = TextTokenizer(**record.get("tokenizer", {})).path
    peak = record.get("learning_rate")
    if peak is not None:
        # the file of an earlier conversion has a tenth of the peak
        peak = check_positive("learning_rate", peak) * (10 if file.suffix == ".toml" else 1)
    values = {**record, **_count_batches(record, _read_result(file))}
    return RecordedTraining(
        file=file,
        peak=peak,
        settings={name: values[name] for name in SETTINGS if name in values},
        corpus=corpus,
        tokenizer=None if named is None else paths.absolute(named),
        missing=tuple(paths.missing),
    )


class _Paths:
    """Makes recorded paths absolute: they are relative to the folder that the training was started in."""

    def __init__(self, *folders: Path) -> None:
        self._folders = (folders[0], Path.cwd(), *folders[1:])
        self.missing: list[str] = []

    def absolute(self, path: str) -> str:
        found = [os.path.abspath(folder / path) for folder in self._folders]
        for place in found:
            if os.path.exists(place):
                return place
        self.missing.append(found[0])
        return found[0]

    def absolute_corpus(self, given: Source, **others: Any) -> Source:
        """A corpus or source with absolute paths. others: fields to replace."""
        names: dict[str, Any] = {
            name: tuple(map(self.absolute, getattr(given, name))) for name in ("paths", "held_out", "excluded")
        }
        return dataclasses.replace(given, **names, **others)


def _write_changes(settings: TextSource) -> dict[str, Any]:
    """The fields that are not at their default."""
    defaults = dataclasses.asdict(type(settings)())
    return {name: value for name, value in dataclasses.asdict(settings).items() if value != defaults[name]}


def _find_start(file: Path) -> Path:
    """The folder that the training of run.json was started in, where its result.json shows it; else the current one."""
    output = Path(_read_result(file).get("output", ""))
    depth = len(output.parts)
    if depth and not output.is_absolute() and file.parent.parts[-depth:] == output.parts:
        return file.parents[depth]
    return Path.cwd()


def _read_result(file: Path) -> dict[str, Any]:
    """The whole configuration, of which run.json is a part, of a training that has ended; {} before."""
    try:
        run = read_json_object(file.with_name("result.json"))["run"]
    except (ValueError, KeyError):
        return {}
    return run if isinstance(run, dict) else {}


def _count_batches(record: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, int]:
    """rows_a_step of run.json, of all processes together, as batches of one process."""
    if "rows_a_step" not in record:
        return {}
    rows = check_size("rows_a_step", record["rows_a_step"])
    batch = result.get("batch_size", rows)
    if not isinstance(batch, int) or batch < 1 or rows % batch:
        batch = rows
    return {"batch_size": batch, "accumulation": rows // batch}


def _read_toml(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # the `train` extra brings it
        import tomli as tomllib
    check_file(file)
    return tomllib.loads(file.read_text("utf-8"))


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
            f"output = {_write_toml(str(place.with_name(place.name + '-trained')))}",
            f"max_steps = {steps}",
            f"learning_rate = {peak / 10:g}",
            f"warmup_fraction = {min(WARMUP_STEPS / steps, 0.1):g}",
            *([f"# As in {_write_comment(training.file)}:"] if training.file is not None and training.settings else []),
            *_write_lines(training.settings),
            "",
            "[model]",
            f"path = {_write_toml(str(place))}",
            "",
            *_write_corpus(training),
            *_write_tokenizer(training, tokenizer),
        ]
    )


DISTILLATION_LENGTH = 512
DISTILLATION = """\
# The hybrid in this folder learns from its teacher, when this is given to `fastweights distill`: first each memory the output of
# the attention in its place, then the model the teacher's distribution over the next token. Lengths and rates are those of HALO
# (arXiv 2601.22156), which trains 20,000 steps per stage. A last stage without a teacher has objective = "text" and longer rows.
"""
SELECTION = """\
# The layers that keep attention are the best by KL on held-out text; layers.json in the folder ...-layers has the ranking. Its
# budget per layer, which `fastweights convert --keep auto:N --run-file` takes from here:
[selection]"""


def distillation_file(
    folder: Path,
    *,
    teacher: Path,
    training: RecordedTraining,
    steps: int,
    tokenizer: bool,
    selection: Mapping[str, int] | None = None,
) -> str:
    """A run file (TOML) for `fastweights distill`, by which the hybrid in `folder` learns from its teacher. All paths in it are
    absolute.

    Args:
        teacher: its folder.
        training: what is recorded of the teacher's training; its text, tokenizer and precision are kept.
        steps: of each stage.
        tokenizer: whether the folder has one.
        selection: the budget of the ranking that chose the layers; None where there was none.
    """
    place = folder.resolve()
    kept = {name: training.settings[name] for name in ("precision",) if name in training.settings}
    stages = (("attention", 1e-3, 1e-5), ("logits", 1e-4, 1e-5))
    return "\n".join(
        [
            DISTILLATION.rstrip(),
            f"output = {_write_toml(str(place.with_name(place.name + '-distilled')))}",
            f"teacher = {_write_toml(str(teacher.resolve()))}",
            f"length = {DISTILLATION_LENGTH}",
            *_write_lines(kept),
            "",
            "[model]",
            f"path = {_write_toml(str(place))}",
            "",
            *([SELECTION, *_write_lines(selection), ""] if selection else []),
            *_write_corpus(training),
            *_write_tokenizer(training, tokenizer),
            *(
                f"[[stages]]\nname = {_write_toml(name)}\nobjective = {_write_toml(name)}\nmax_steps = {steps}\n"
                f"learning_rate = {rate:g}\nfinal_learning_rate = {last:g}\n"
                for name, rate, last in stages
            ),
        ]
    )


def _write_corpus(training: RecordedTraining) -> list[str]:
    if training.corpus is None:
        return [DEFAULT_TEXT]
    missing = [f"# Not found on this machine: {_write_comment(path)}" for path in training.missing]
    if not training.corpus:
        return [*missing, "# The text is that of this machine's Python installation, as it was for the source.", ""]
    corpus = dict(training.corpus)
    sources = [
        line for source in corpus.pop("sources", ()) for line in ("", "[[corpus.sources]]", *_write_lines(source))
    ]
    return [*missing, "[corpus]", *_write_lines(corpus), *sources, ""]


def _write_tokenizer(training: RecordedTraining, in_folder: bool) -> list[str]:
    """Nothing where the folder has one: the training takes it."""
    if in_folder:
        return []
    if training.tokenizer is None:
        return [NO_TOKENIZER]
    return ["[tokenizer]", f"path = {_write_toml(training.tokenizer)}", ""]


def _write_lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_write_toml(value)}" for name, value in values.items()]


def _write_toml(value: Any) -> str:
    """As TOML writes it: JSON's values, but for characters beyond 16 bits, and with DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_comment(path: Path | str) -> str:
    """A path in a comment, where TOML has no escapes: in ASCII."""
    return json.dumps(str(path)).replace("\x7f", "\\u007f")
