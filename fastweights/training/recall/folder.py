"""The output folder of an experiment: which file is where, and whether the experiment may use the folder."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...analysis.plots import PLOT_FILES
from ...environment import versions
from ...files import any_file
from ...models.loading import SAVED_MODEL
from ...results.recall import load_result
from ..checkpoints import DamagedCheckpoint, load_checkpoint
from ..folder import OwnedFolder, as_stored
from .experiment import RecallExperiment, RecallRun

__all__ = ["ExperimentFolder"]

RUN_FILE = re.compile(r".+-pairs\d+-lr.+-seed\d+\.(json|checkpoint)")
_DECIDING_VERSIONS = ("fastweights", "torch")  # others of these may give other numbers


def _is_of_a_run(path: Path) -> bool:
    return RUN_FILE.fullmatch(path.name) is not None


class ExperimentFolder(OwnedFolder):
    """A folder that holds one experiment and nothing else.

    experiment.json         the configuration, and the versions that the numbers depend on
    runs/NAME.json          the result of a run that has ended
    runs/NAME.checkpoint    where an interrupted run continues
    runs/NAME.model         the trained model, where the experiment keeps it
    results.json, *.png     all results with their summary, and the plots
    """

    MARKER, WORK = "experiment.json", "experiment"
    KEYS = ("task", "mixers", "pairs", "learning_rates", "seeds", "steps")
    OWN = {
        "runs": {"*.json": _is_of_a_run, "*.checkpoint": _is_of_a_run, "*-seed*.model": SAVED_MODEL},
        **dict.fromkeys(("results.json", *PLOT_FILES), any_file),
    }
    LONGER = (
        "steps",
        "the learning rate has its warm-up and its schedule over steps, so that a run with more steps starts from the beginning",
    )

    def describe(self, work: RecallExperiment) -> dict[str, Any]:
        deciding = {name: version for name, version in versions().items() if name in _DECIDING_VERSIONS}
        return as_stored({**work.record(), **deciding})

    def result(self, run: RecallRun) -> Path:
        """The file of the run's result."""
        return self.path / "runs" / f"{run.name}.json"

    def checkpoint(self, run: RecallRun) -> Path:
        """The file of the run's checkpoint."""
        return self.path / "runs" / f"{run.name}.checkpoint"

    def model(self, run: RecallRun) -> Path:
        """The folder of the run's model."""
        return self.path / "runs" / f"{run.name}.model"

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
        wanted = self.describe(experiment)
        with self.held_for(wanted, overwrite=overwrite, check=lambda: self._check_files(experiment, report)):
            (self.path / "runs").mkdir(exist_ok=True)
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
