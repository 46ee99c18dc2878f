"""The recall experiment as a function: train the grid, gather the results."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checks import check_flag, check_number, check_path, check_size, check_texts, describe_value, error_prefix
from ...kinds import checked
from ...layers.choice import check_backend
from ...results import RecallResult, save_results
from ...results.recall import load_result, save_result
from ..calling_script import work_begins
from ..engine import train_jobs
from ..pool import Pool, Worker, WorkerError, usual_workers
from ..progress import LOG_EVERY, Reporter, Silent
from .experiment import RecallExperiment, RecallRun
from .folder import ExperimentFolder
from .objectives import make_objective
from .train import train_run
from .watching import find_watches

__all__ = ["RecallJob", "check_models", "make_repeatable", "plan_recall", "run_recall", "run_recall_parts"]

LESS_MEMORY = "a smaller batch_size, or fewer workers,"
REPORT_SECONDS = 0.2


def make_repeatable() -> None:
    """Let this process train with deterministic algorithms, where PyTorch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


@dataclass(frozen=True)
class RecallJob:
    """A run, and the folder of its experiment. part: the experiment's name where there are several."""

    run: RecallRun
    folder: ExperimentFolder
    part: str
    checkpoint_seconds: float
    log_every: int

    @property
    def name(self) -> str:
        return f"{self.part}/{self.run.name}" if self.part else self.run.name

    @property
    def cost(self) -> int:
        return self.run.tokens

    def has_ended(self) -> bool:
        return self.folder.result(self.run).exists()

    def __call__(self, worker: Worker) -> RecallResult | None:
        make_repeatable()
        checkpoint = self.folder.checkpoint(self.run)
        result = train_run(
            self.run,
            checkpoint,
            checkpoint_seconds=self.checkpoint_seconds,
            on_step=self._reports(worker),
            should_stop=worker.should_stop,
            model_folder=self.folder.model(self.run),
        )
        if result is not None:
            save_result(self.folder.result(self.run), result)
            checkpoint.unlink(missing_ok=True)
        return result

    def _reports(self, worker: Worker) -> Callable[[int, float | None], None]:
        """A function that reports steps, a few times per second."""
        last_time, last_step = time.monotonic(), None

        def report(step: int, loss: float | None) -> None:
            nonlocal last_time, last_step
            now = time.monotonic()
            if last_step is None:
                last_time, last_step = now, step
            elif now - last_time >= REPORT_SECONDS or step % self.log_every == 0:
                worker.report((step, loss, (step - last_step) / max(now - last_time, 1e-9)))
                last_time, last_step = now, step

        return report


@checked
def run_recall(
    experiment: RecallExperiment,
    output: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    checkpoint_seconds: float = 10.0,
    reporter: Reporter | None = None,
    log_every: int = LOG_EVERY,
    imports: Sequence[str] = (),
) -> list[RecallResult]:
    """Train every run of `experiment` and write results to the folder `output`; runs whose results are there are not repeated.

    Killed at any moment and called again with the same arguments, it continues and gives the same numbers: every run is
    computed on one thread, from batches that are a function of their index. A run whose checkpoint is damaged begins again,
    and the reporter says so. The number of workers changes nothing but the time. A script that calls this needs no
    `if __name__ == "__main__":`. With that line workers import the script, as multiprocessing does. Without it they run it only
    where it registered mixers or tasks, and only up to this call.

    Args:
        experiment: the grid of runs.
        output: folder for results.json, single results and checkpoints; made if it does not exist.
        workers: processes; None takes one for each usable core on the CPU, else one per GPU. The device "cuda" stands for all
            GPUs of the machine, over which the workers are spread; "cuda:1" for that one.
        overwrite: delete the results of an earlier experiment in `output` and start again.
        checkpoint_seconds: time between two saves of a run.
        reporter: receives the progress, a few times per second and after every `log_every` steps of a run.
        log_every: steps.
        imports: modules, by name or path of a .py file, that register mixers of the experiment; this process has imported
            them already, the workers do so too. Installed plug-ins need none.

    Returns:
        The results in the order of `experiment.runs()`.

    Raises:
        ValueError: `output` cannot be used (see `ExperimentFolder.opened`), or an argument is wrong. Nothing has changed.
        WorkerError: runs failed, or their workers died; the same call trains them again. The others have been trained, and
            results.json holds them.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. Every worker has then finished its
            step and saved its run, and results.json holds the runs that have ended; the same call continues.
    """
    together = run_recall_parts(
        {"": experiment}, {"": output}, workers=workers, overwrite=overwrite, checkpoint_seconds=checkpoint_seconds,
        reporter=reporter, log_every=log_every, imports=imports,
    )  # fmt: skip
    return together[""]


@checked
def run_recall_parts(
    parts: Mapping[str, RecallExperiment],
    outputs: Mapping[str, str | Path],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    checkpoint_seconds: float = 10.0,
    reporter: Reporter | None = None,
    log_every: int = LOG_EVERY,
    imports: Sequence[str] = (),
) -> dict[str, list[RecallResult]]:
    """`run_recall` for several experiments by name, each with a folder of its own: all their runs wait in one queue."""
    work_begins("run_recall")
    if set(outputs) != set(parts):
        wanted, got = describe_value(list(parts)), describe_value(list(outputs))
        raise ValueError(f"outputs must have a folder for each of parts, {wanted}, got {got}")
    for experiment in parts.values():
        if not isinstance(experiment, RecallExperiment):
            raise TypeError(f"experiment must be a RecallExperiment, got {describe_value(experiment)}")
    folders = {name: ExperimentFolder(check_path("output", outputs[name], "the path of a folder")) for name in parts}
    check_flag("overwrite", overwrite)
    imports = check_texts("imports", imports, what="modules or paths of .py files", empty=False)
    if workers is None:
        workers = min(usual_workers(experiment.device, per_gpu=1) for experiment in parts.values())
    check_size("workers", workers, high=1024)
    check_size("log_every", log_every)
    check_number("checkpoint_seconds", checkpoint_seconds, low=0)
    jobs = [
        RecallJob(run, folders[name], name, checkpoint_seconds, log_every)
        for name, experiment in parts.items()
        for run in experiment.runs()
    ]
    for name, experiment in parts.items():
        with error_prefix(f"part {name}") if name else nullcontext():
            check_models(experiment.runs())
    reporter = reporter or Silent()
    devices = {experiment.device for experiment in parts.values()}
    pool = Pool(workers=workers, devices=devices, imports=imports, what="run", less_memory=LESS_MEMORY)
    with ExitStack() as opened:
        for name, experiment in parts.items():
            opened.enter_context(folders[name].opened(experiment, overwrite=overwrite, report=reporter.note))
        failure: WorkerError | KeyboardInterrupt | None = None
        try:
            train_jobs(jobs, pool, reporter)
        except KeyboardInterrupt as interruption:
            failure = interruption
        except WorkerError as error:
            if error.ends_all:
                raise
            failure = error
        results = {name: _gather_results(experiment, folders[name]) for name, experiment in parts.items()}
        if failure:
            raise failure
    return results


def plan_recall(
    parts: Mapping[str, RecallExperiment], outputs: Mapping[str, str | Path], *, overwrite: bool = False
) -> list[dict[str, Any]]:
    """What `run_recall_parts` would train: the settings of each part and, per mixer and number of pairs, the parameters of the
    model and how many runs there are and have ended. Nothing is written.

    Raises:
        ValueError: as `run_recall`, but for damaged results.
    """
    plan = []
    for name, experiment in parts.items():
        folder = ExperimentFolder(check_path("output", outputs[name], "the path of a folder"))
        folder.check(experiment, overwrite=overwrite)
        with error_prefix(f"part {name}") if name else nullcontext():
            check_models(experiment.runs())
        groups: dict[tuple[str, int], list[RecallRun]] = {}
        for run in experiment.runs():
            groups.setdefault((run.choice.label, run.pairs), []).append(run)
        models = [_plan_models(runs, folder, overwrite) for runs in groups.values()]
        settings = {**experiment.record(), "block": experiment.block}
        plan.append({"part": name, "output": str(folder.path), "settings": settings, "models": models})
    return plan


def _plan_models(runs: Sequence[RecallRun], folder: ExperimentFolder, overwrite: bool) -> dict[str, Any]:
    """One mixer at one number of pairs."""
    model = _build_without_weights(runs[0])
    ended = 0 if overwrite else sum(folder.result(run).exists() for run in runs)
    return {
        "mixer": runs[0].choice.label, "pairs": runs[0].pairs, "parameters": model.num_parameters(),
        "state size": model.state_size(runs[0].make_task().length), "steps": runs[0].steps, "runs": len(runs), "ended": ended,
    }  # fmt: skip


def _gather_results(experiment: RecallExperiment, folder: ExperimentFolder) -> list[RecallResult]:
    """The results of the runs that have ended, also in results.json."""
    ended = [run for run in experiment.runs() if folder.result(run).exists()]
    results = [load_result(folder.result(run), run=run.record()) for run in ended]
    if results:
        save_results(folder.results, experiment=experiment.record(), results=results)
    return results


def check_models(runs: Sequence[RecallRun]) -> None:
    """Raises, before any is trained, the ValueError of a mixer that cannot be built in this size or run on this device, or of
    `watch_every` where nothing is installed that looks."""
    if any(run.watch_every for run in runs):
        find_watches()
    for run in {run.choice.label: run for run in runs}.values():
        _build_without_weights(run)
        check_backend(run.choice.name, run.choice.options, run.device)


def _build_without_weights(run: RecallRun) -> Any:
    """The model that a run trains, without memory for its weights."""
    block = "" if run.block == "published" else f" in the {run.block} block"
    with torch.device("meta"), error_prefix(f"mixer {run.choice.label}{block}"):
        return make_objective(run.make_task()).build(run.model_config())
