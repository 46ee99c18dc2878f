"""The recall experiment as a function: train the grid, gather the results."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from ..checks import check_flag, check_number, check_path, check_size, check_texts, describe_value, error_prefix
from ..kinds import checked
from ..results import RecallResult, save_results
from ..results.recall import load_result
from .experiment import RecallExperiment, RecallRun
from .folder import ExperimentFolder
from .objectives import objective_of
from .progress import LOG_EVERY, Reporter, Silent
from .workers import Job, WorkerError, train_runs, usual_workers

__all__ = ["check_models", "run_recall", "run_recall_parts"]


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
    and the reporter says so. The number of workers changes nothing but the time. Workers import the script that calls
    this, which therefore needs the usual `if __name__ == "__main__":`.

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
    jobs = [Job(run, folders[name], name) for name, experiment in parts.items() for run in experiment.runs()]
    for name, experiment in parts.items():
        with error_prefix(f"part {name}") if name else nullcontext():
            check_models(experiment.runs())
    reporter = reporter or Silent()
    with ExitStack() as opened:
        for name, experiment in parts.items():
            opened.enter_context(folders[name].opened(experiment, overwrite=overwrite, report=reporter.note))
        pending = [job for job in jobs if not job.folder.result(job.run).exists()]
        failure: WorkerError | KeyboardInterrupt | None = None
        if pending:
            with reporter:
                reporter.begin([job.run for job in pending], total=len(jobs))
                try:
                    train_runs(
                        sorted(pending, key=lambda job: -job.run.tokens),  # the longest first, to end together
                        workers=workers,
                        checkpoint_seconds=checkpoint_seconds,
                        reporter=reporter,
                        log_every=log_every,
                        imports=imports,
                    )
                except KeyboardInterrupt as interruption:
                    failure = interruption
                except WorkerError as error:
                    if error.ends_all:
                        raise
                    failure = error
        results = {name: _gathered(experiment, folders[name]) for name, experiment in parts.items()}
        if failure:
            raise failure
    return results


def _gathered(experiment: RecallExperiment, folder: ExperimentFolder) -> list[RecallResult]:
    """The results of the runs that have ended, also in results.json."""
    ended = [run for run in experiment.runs() if folder.result(run).exists()]
    results = [load_result(folder.result(run), run=run.record()) for run in ended]
    if results:
        save_results(folder.results, experiment=experiment.record(), results=results)
    return results


def check_models(runs: Sequence[RecallRun]) -> None:
    """Raises the ValueError of a mixer that cannot be built in this size, before any is trained."""
    one_of_each = {run.choice.label: run for run in runs}.values()
    with torch.device("meta"):  # shapes only
        for run in one_of_each:
            with error_prefix(f"mixer {run.choice.label}"):
                objective_of(run.make_task()).build(run.model_config())
