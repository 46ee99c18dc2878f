"""The output folder of an experiment: which file is where, and whether the experiment may use the folder."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ..analysis.plots import PLOT_FILES
from ..environment import versions
from ..files import Own, any_file
from ..models.loading import SAVED_MODEL
from ..outputs import refuse_links
from ..results.recall import load_result
from .checkpoint import DamagedCheckpoint, load_checkpoint
from .experiment import RecallExperiment, RecallRun
from .output_folder import OwnedFolder, as_stored

__all__ = ["ExperimentFolder", "remove_trainings"]

RUN_FILE = re.compile(r".+-pairs\d+-lr.+-seed\d+\.(json|checkpoint)")
LONGER = (
    "steps",
    "the learning rate has its warm-up and its schedule over steps, so that a run with more steps starts from the beginning",
)


def _is_of_a_run(path: Path) -> bool:
    return RUN_FILE.fullmatch(path.name) is not None


OWN: Own = {
    "runs": {"*.json": _is_of_a_run, "*.checkpoint": _is_of_a_run, "*-seed*.model": SAVED_MODEL},
    **dict.fromkeys(("results.json", *PLOT_FILES), any_file),
}
KEYS = ("task", "mixers", "pairs", "learning_rates", "seeds", "steps")  # of experiment.json
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
        self._owned = OwnedFolder(path, "experiment.json", KEYS, "experiment", OWN, longer=LONGER)
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

    def locked(self) -> AbstractContextManager[None]:
        """The folder for this process alone, as while its plots are drawn."""
        return self._owned.locked()

    def remove(self) -> None:
        """Delete the experiment."""
        self._owned.remove()

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
        with self._owned.held_for(wanted, overwrite=overwrite, check=lambda: self._check_files(experiment, report)):
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


def _identity(experiment: RecallExperiment) -> dict[str, Any]:
    """What the numbers of an experiment depend on."""
    deciding = {name: version for name, version in versions().items() if name in _DECIDING_VERSIONS}
    return as_stored({**experiment.record(), **deciding})


def remove_trainings(folder: Path) -> None:
    """Delete what trainings wrote in a folder and in those below it, and nothing else.

    Raises:
        ValueError: a link leads to one, or another process has it.
    """
    refuse_links("output", folder)
    for marker in sorted(folder.rglob("experiment.json")):
        ExperimentFolder(marker.parent).remove()
    for marker in sorted(folder.rglob("run.json")):
        from .language.folder import LanguageFolder  # here: who trains none may not have its packages

        LanguageFolder(marker.parent).remove()
