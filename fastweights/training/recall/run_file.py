"""Recall experiments from a TOML file: settings, and parts that change some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...checks import check_path, check_size, check_text, closest, describe_value, error_prefix
from ...kinds import checked
from ..run_files import Override, check_run_file, from_mapping, override_settings, parse_overrides, read_toml
from .experiment import RecallExperiment
from .settings import Stage

__all__ = ["RecallFile", "load_recall_file"]

OF_THE_FILE = ("output", "workers")  # keys that are no fields of an experiment
# What differs from the defaults of `RecallExperiment` without a file: every memory then learns in minutes on a laptop, and the
# rate is chosen by other sequences than the reported ones. The defaults stay, so that folders of files that do not set these
# continue.
WITHOUT_FILE: Mapping[str, Any] = {"block": "matched", "pairs": [4, 8], "validation_examples": 256}


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallFile:
    """What a run file of recall says.

    Attributes:
        output: folder for the results; each part has a folder of its name in it.
        parts: the experiments by name; a file without parts has one, named "".
        workers: processes; see `run_recall`.
    """

    output: str = "runs/recall"
    parts: Mapping[str, RecallExperiment] = dataclasses.field(default_factory=lambda: {"": RecallExperiment()})
    workers: int | None = None

    def __post_init__(self) -> None:
        check_text("output", self.output, what="the path of a folder", empty=False)
        if self.workers is not None:
            check_size("workers", self.workers)
        for name in self.parts:
            if name in (".", "..") or Path(name).name != name or "\0" in name or (not name and len(self.parts) > 1):
                raise ValueError(
                    f"parts must have names that can be folders, got {name!r}; leave out /, .. and the character 0"
                )
        for folder in self.folders().values():
            check_path("output", folder, "the path of a folder")

    def folders(self) -> dict[str, Path]:
        """The output folder of each part."""
        return {name: Path(self.output, name) for name in self.parts}


def load_recall_file(path: str | Path | None, *, overrides: Sequence[str] = (), **changes: Any) -> RecallFile:
    """The experiments that a .toml file describes; without a file one with the default settings but for `WITHOUT_FILE`.

    Its keys are the fields of `RecallExperiment`, and output and workers. mixers holds names, texts such as
    "gka:ridge=0.01@a", or tables with name, options and label; [task_options] the task's own options; [[curriculum]] or
    [[mixture]] one table per stage with pairs, steps and length. [parts.NAME] holds keys that replace those above, for one
    experiment per part.

    Args:
        overrides: keys and values such as "task_options.padding=start", over all that the file, its parts and `changes` say.
            Those of one part begin with "parts.NAME.".
        changes: fields of `RecallExperiment`, output or workers, over those of the file and of each part.

    Raises:
        ValueError: no such file, bad syntax, an unknown key, or a value that does not fit; the message names the part.
    """
    replaced = parse_overrides(overrides)
    if path is None:
        values = dict(WITHOUT_FILE)
        if {"curriculum", "mixture"} & {*changes, *(key[0] for key, _ in replaced)}:
            del values["pairs"]  # the stages decide them
        return _make_file(values, changes, replaced)
    file = check_run_file(path, ".toml")
    values = read_toml(file)
    try:
        return _make_file(values, changes, replaced)
    except (ValueError, TypeError) as error:
        raise ValueError(f"run file {file}: {error}") from None


def _make_file(values: dict[str, Any], changes: dict[str, Any], overrides: Sequence[Override]) -> RecallFile:
    of_file = [override for override in overrides if override[0][0] in OF_THE_FILE]
    of_parts = [override for override in overrides if override[0][0] == "parts"]
    of_experiments = [override for override in overrides if override not in (*of_file, *of_parts)]
    whole = {name: values.pop(name) for name in OF_THE_FILE if name in values}
    whole = override_settings(
        {**whole, **{name: changes.pop(name) for name in OF_THE_FILE if name in changes}}, of_file
    )
    known = values["parts"] if isinstance(values.get("parts"), dict) else {}
    for (_, *key), _ in of_parts:
        if len(key) < 2 or key[0] not in known:
            near = closest(key[0], known) if key else ""
            raise ValueError(
                f"--set parts.{'.'.join(key)} must name a part of the file and a key of it{near}; the parts are "
                f"{', '.join(known) or 'none'}"
            )
    parts = override_settings(values, of_parts).get("parts", {"": {}})
    values.pop("parts", None)
    if not isinstance(parts, dict) or not parts or not all(isinstance(own, dict) for own in parts.values()):
        raise TypeError(f"parts must be tables [parts.NAME], got {describe_value(parts)}")
    if "" in parts and parts != {"": {}}:
        raise ValueError("parts must have names that can be folders, got ''; write [parts.NAME]")
    made = {}
    for name, own in parts.items():
        with error_prefix(f"part {name}") if name else nullcontext():
            made[name] = from_mapping(
                RecallExperiment,
                _read_tables(override_settings({**values, **own, **changes}, of_experiments)),
                "the file",
                (*OF_THE_FILE, "parts"),
            )
    return RecallFile(parts=made, **whole)


def _read_tables(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the tables of a curriculum or a mixture as stages."""
    for kind in ("curriculum", "mixture"):
        if isinstance(values.get(kind), list):
            stages = [from_mapping(Stage, x, f"a table of {kind}") if isinstance(x, dict) else x for x in values[kind]]
            values = {**values, kind: stages}
    return values
