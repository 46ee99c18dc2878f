"""The output folder of an experiment: which file is where, and whether the experiment may use the folder."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..analysis.plots import PLOT_FILES
from ..environment import versions
from ..results.recall import load_result
from .checkpoint import DamagedCheckpoint, load_checkpoint
from .experiment import RecallExperiment, RecallRun
from .output_folder import OwnedFolder, as_stored

__all__ = ["ExperimentFolder"]

LONGER = (
    "steps",
    "the learning rate has its warm-up and its schedule over steps, so that a run with more steps starts from the beginning",
)
_DECIDING_VERSIONS = ("fastweights", "torch")  # others of these may give other numbers


class ExperimentFolder:
    """A folder that holds one experiment and nothing else.

    experiment.json         the configuration, and the versions that the numbers depend on
    runs/NAME.json          the result of a run that has ended
    runs/NAME.checkpoint    where an interrupted run continues
    runs/NAME.model         the trained model, where the experiment keeps it
    results.json, *.png     all results with their summary, and the plots
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.json"
        self._owned = OwnedFolder(path, "experiment.json", "experiment", longer=LONGER)
        self._runs = path / "runs"

    def result(self, run: RecallRun) -> Path:
        """The file of the run's result."""
        return self._runs / f"{run.name}.json"

    def checkpoint(self, run: RecallRun) -> Path:
        """The file of the run's checkpoint."""
        return self._runs / f"{run.name}.checkpoint"

    def model(self, run: RecallRun) -> Path:
        """The folder of the run's model."""
        return self._runs / f"{run.name}.model"

    def check(self, experiment: RecallExperiment, *, overwrite: bool) -> None:
        """ValueError where `opened` would refuse the folder, but for damaged results. Nothing is written."""
        self._owned.check(_identity(experiment), overwrite=overwrite)

    @contextmanager
    def opened(
        self, experiment: RecallExperiment, *, overwrite: bool, report: Callable[[str], None] = lambda line: None
    ) -> Iterator[None]:
        """Lock the folder for `experiment`, new or continued. Its files stay unchanged unless every check passes. Damaged
        checkpoints are then deleted, and named to `report`: their runs begin again.

        Raises:
            ValueError: the folder cannot be written to, is in use by another process, or holds other files; or,
                without `overwrite`, it holds another experiment or a damaged result.
        """
        wanted = _identity(experiment)
        clear = self._clear if overwrite else None
        with self._owned.held_for(wanted, clear=clear, check=lambda: self._check_files(experiment, report)):
            self._runs.mkdir(exist_ok=True)
            yield

    def _check_files(self, experiment: RecallExperiment, report: Callable[[str], None]) -> None:
        damaged = []
        for run in experiment.runs():
            checkpoint = self.checkpoint(run)
            if self.result(run).exists():
                load_result(self.result(run), run=run.record())
            elif checkpoint.exists():
                try:
                    load_checkpoint(checkpoint, run=run.record())
                except DamagedCheckpoint:
                    damaged.append((run, checkpoint))
        for run, checkpoint in damaged:
            checkpoint.unlink()
            report(f"{run.title}: its checkpoint {checkpoint} is damaged, so this run begins again")

    def _clear(self) -> None:
        plots = [self.path / name for name in PLOT_FILES]
        for file in [self.results, *plots, *self._runs.glob("*.json"), *self._runs.glob("*.checkpoint")]:
            file.unlink(missing_ok=True)
        for model in self._runs.glob("*.model"):
            shutil.rmtree(model)


def _identity(experiment: RecallExperiment) -> dict[str, Any]:
    """What the numbers of an experiment depend on."""
    deciding = {name: version for name, version in versions().items() if name in _DECIDING_VERSIONS}
    return as_stored({**experiment.record(), **deciding})
