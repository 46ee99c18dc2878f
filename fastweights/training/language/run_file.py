"""Run files: a TOML file whose keys are the fields of a `LanguageRun`, or a Python file that defines `run`."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checks import check_choice, check_flag, describe_value
from ...data.text import TextCorpus, TextSource, TextTokenizer
from ...layers import MixerChoice
from ..run_files import (
    Override,
    check_run_file,
    from_mapping,
    override_settings,
    parse_overrides,
    read_fields,
    read_toml,
)
from .run import LanguageRun, Run
from .schedule import reset_alternatives
from .stages import LISTS, make_lists
from .tiny import tiny_run

__all__ = ["load_run"]

TABLES: dict[str, type[Any]] = {"corpus": TextCorpus, "tokenizer": TextTokenizer}
MODELS = ("mixers", "presets")  # which models a run trains


def load_run(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    tiny: bool = False,
    kind: type[Run] = LanguageRun,  # type: ignore[assignment]
    **changes: Any,
) -> Run:
    """The run that a file describes, with `changes` (fields of `LanguageRun`) over it, and over both `overrides`, keys and values
    such as "model.num_heads=8". tiny: the run of the file is made small first (`tiny_run`), with the mixers or
    presets that changes and overrides choose. kind: of run, such as `fastweights.distillation.DistillRun`.

    A .toml file has the fields as keys, the tables [model], [corpus] and [tokenizer], and lists of tables [[stages]],
    [[batch_ramp]] and [[groups]]. A .py file is executed; it defines `run`, a `LanguageRun` or a function without arguments that
    returns one. A change or override also replaces the fields that say the same, as max_steps does max_tokens.

    Raises:
        ValueError: no such file, a file of another kind, bad syntax, an unknown key, a value that does not fit.
    """
    if not (isinstance(kind, type) and issubclass(kind, LanguageRun)):
        raise TypeError(f"kind must be LanguageRun or a class made of it, got {describe_value(kind)}")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in changes:
        check_choice("a change", name, known)
    file = check_run_file(path, ".toml", ".py")
    replaced = parse_overrides(overrides)
    run = _from_toml(file, kind) if file.suffix == ".toml" else _from_python(file, kind)
    if check_flag("tiny", tiny):
        models = {name: changes.pop(name) for name in MODELS if name in changes}
        chosen = [override for override in replaced if override[0][0] in MODELS]
        run = tiny_run(_change_run(run, models, chosen))
        replaced = [override for override in replaced if override not in chosen]
    return _change_run(run, changes, replaced)


def _change_run(run: Run, changes: Mapping[str, Any], replaced: Sequence[Override]) -> Run:
    run = dataclasses.replace(run, **{**reset_alternatives(changes), **changes})
    if not replaced:
        return run
    reset = reset_alternatives({key[0]: value for key, value in replaced if len(key) == 1})
    return _make_run(override_settings({**_write_tables(run), **reset}, replaced), type(run))


def _from_toml(file: Path, kind: type[Run]) -> Run:
    values = read_toml(file)
    try:
        return _make_run(values, kind)
    except (ValueError, TypeError) as error:
        raise ValueError(f"run file {file}: {error}") from None


def _make_run(values: dict[str, Any], kind: type[Run]) -> Run:
    """The run of the tables of a file."""
    tables = {key: dict(values[key]) for key in TABLES if isinstance(values.get(key), dict)}
    sources = tables.get("corpus", {}).get("sources")
    if isinstance(sources, (list, tuple)) and all(isinstance(source, dict) for source in sources):
        made = [from_mapping(TextSource, source, "[[corpus.sources]]") for source in sources]
        tables["corpus"]["sources"] = made
    tables = {key: from_mapping(TABLES[key], table, f"[{key}]") for key, table in tables.items()}
    return from_mapping(kind, {**make_lists(values), **tables}, "the file")


def _write_tables(run: LanguageRun) -> dict[str, Any]:
    """The tables of a file that describes the run."""
    tables = {key: read_fields(getattr(run, key)) for key in TABLES}
    tables["corpus"]["sources"] = [read_fields(source) for source in run.corpus.sources]
    lists = {key: [read_fields(one) for one in getattr(run, key)] for key in LISTS}
    mixers = [MixerChoice.of(mixer).record() for mixer in run.mixers]
    return {**read_fields(run), **tables, **lists, "mixers": mixers}


def _from_python(file: Path, kind: type[Run]) -> Run:
    try:
        run = runpy.run_path(str(file)).get("run")
        run = run() if callable(run) else run
    except (Exception, SystemExit) as error:
        raise ValueError(f"run file {file}: {type(error).__name__}: {error}") from error
    if not isinstance(run, kind) or run.COMMAND != kind.COMMAND:
        raise ValueError(
            f"run file {file} must define `run`, a {kind.__name__} or a function that returns one, got {type(run).__name__}"
        )
    return run
