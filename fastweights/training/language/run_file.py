"""Run files: a TOML file whose keys are the fields of a `LanguageRun`, or a Python file that defines `run`."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from ...checks import check_choice
from ...data.text import TextCorpus, TextTokenizer
from ...kinds import checked
from ..toml_file import check_run_file, from_mapping, read_toml
from .run import LanguageRun

__all__ = ["load_run"]


@checked
def load_run(path: str | Path, **changes: Any) -> LanguageRun:
    """The run that a file describes, with `changes` (fields of `LanguageRun`) over it.

    A .toml file has the fields as keys, and the tables [model], [corpus] and [tokenizer]. A .py file is executed; it defines
    `run`, a `LanguageRun` or a function without arguments that returns one.

    Raises:
        ValueError: no such file, a file of another kind, bad syntax, an unknown key, a value that does not fit.
    """
    known = [field.name for field in dataclasses.fields(LanguageRun)]
    for name in changes:
        check_choice("a change", name, known)
    file = check_run_file(path, ".toml", ".py")
    run = _from_toml(file) if file.suffix == ".toml" else _from_python(file)
    return dataclasses.replace(run, **changes)


def _from_toml(file: Path) -> LanguageRun:
    values = read_toml(file)
    try:
        for key, made in (("corpus", TextCorpus), ("tokenizer", TextTokenizer)):
            if isinstance(values.get(key), dict):
                values[key] = from_mapping(made, values[key], f"[{key}]")
        return from_mapping(LanguageRun, values, "the file")
    except (ValueError, TypeError) as error:
        raise ValueError(f"run file {file}: {error}") from None


def _from_python(file: Path) -> LanguageRun:
    try:
        run = runpy.run_path(str(file)).get("run")
        run = run() if callable(run) else run
    except (Exception, SystemExit) as error:
        raise ValueError(f"run file {file}: {type(error).__name__}: {error}") from error
    if not isinstance(run, LanguageRun):
        raise ValueError(
            f"run file {file} must define `run`, a LanguageRun or a function that returns one, got {type(run).__name__}"
        )
    return run
