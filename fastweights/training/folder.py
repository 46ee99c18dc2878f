"""The output folder of an experiment: which file is where, and whether the experiment may use the folder."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from .._files import PARTIAL_FILES, write_json
from ..analysis.plots import PLOT_FILES
from ..analysis.results import load_result
from .checkpoint import load_checkpoint
from .environment import versions
from .experiment import RecallExperiment, RecallRun

__all__ = ["ExperimentFolder"]

_DECIDING_VERSIONS = ("fastweights", "torch")  # others of these may give other numbers


class ExperimentFolder:
    """A folder that holds one experiment and nothing else.

    experiment.json         the configuration, and the versions that the numbers depend on
    runs/NAME.json          the result of a run that has ended
    runs/NAME.checkpoint    where a run that was cut continues
    results.json, *.png     all results with their summary, and the plots
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.json"
        self._experiment = path / "experiment.json"
        self._runs = path / "runs"

    def result(self, run: RecallRun) -> Path:
        """The file of the run's result."""
        return self._runs / f"{run.name}.json"

    def checkpoint(self, run: RecallRun) -> Path:
        """The file of the run's checkpoint."""
        return self._runs / f"{run.name}.checkpoint"

    @contextmanager
    def opened(self, experiment: RecallExperiment, *, overwrite: bool) -> Iterator[None]:
        """Hold the folder for `experiment`, new or continued. What it held stays as it was unless every check passes.

        Raises:
            ValueError: the folder cannot be written to, is in use by another process, or holds other files; or,
                without `overwrite`, it holds another experiment or a damaged file.
        """
        self._refuse_other_files()
        with self._locked():
            wanted = _plain({"experiment": dataclasses.asdict(experiment), "versions": _deciding_versions()})
            if overwrite:
                self._clear()
                write_json(self._experiment, wanted)
            elif self._experiment.exists():
                self._refuse_other_experiment(wanted)
                self._check_files(experiment)
            else:
                write_json(self._experiment, wanted)
            self._runs.mkdir(exist_ok=True)
            yield

    def _refuse_other_files(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"output must be a folder, but {self.path} is a file; choose another output folder")
        if self.path.is_dir() and not self._experiment.exists():
            others = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
            if others:
                raise ValueError(
                    f"output must be a new or empty folder or one of an earlier experiment, but {self.path} holds "
                    f"{others[0]!r} and no experiment.json; choose another output folder"
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / ".lock").acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"output {self.path} is in use by another process; wait until it has ended") from None
        except OSError as error:
            raise ValueError(
                f"output must be a folder that can be written to, but {self.path} cannot: {error.strerror}; "
                "choose another output folder"
            ) from None
        with lock:
            for partial in self.path.rglob(PARTIAL_FILES):
                partial.unlink(missing_ok=True)
            yield

    def _refuse_other_experiment(self, wanted: dict[str, Any]) -> None:
        remedy = "choose another output folder, or pass overwrite to delete these results"
        try:
            stored = json.loads(self._experiment.read_bytes())
            there, here = ({**record["experiment"], **record["versions"]} for record in (stored, wanted))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._experiment} is damaged; {remedy}") from None
        differences = [
            f"{name} is {json.dumps(there.get(name))} there and {json.dumps(here.get(name))} here"
            for name in {**here, **there}
            if there.get(name) != here.get(name)
        ]
        if differences:
            raise ValueError(f"output {self.path} holds another experiment: {', '.join(differences)}; {remedy}")

    def _check_files(self, experiment: RecallExperiment) -> None:
        for run in experiment.runs():
            if self.result(run).exists():
                load_result(self.result(run), run=dataclasses.asdict(run))
            elif self.checkpoint(run).exists():
                load_checkpoint(self.checkpoint(run), run=dataclasses.asdict(run))

    def _clear(self) -> None:
        plots = [self.path / name for name in PLOT_FILES]
        for file in [self.results, *plots, *self._runs.glob("*.json"), *self._runs.glob("*.checkpoint")]:
            file.unlink(missing_ok=True)


def _deciding_versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name in _DECIDING_VERSIONS}


def _plain(value: Any) -> Any:
    """As it comes back from JSON (tuples become lists)."""
    return json.loads(json.dumps(value))
