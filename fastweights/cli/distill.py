"""`fastweights distill`: train a converted model to compute what its teacher does."""

from functools import partial
from pathlib import Path

from ..terminal import Console
from ._options import DryRun, Imports, Overrides, Overwrite, Quiet, one_line_errors
from ._output import show_plots
from ._training import BatchSize, Gpu, LearningRate, MaxSteps, Output, Precision, RunFile, Seed, StopAt, run_training


def distill(
    run_file: RunFile,
    output: Output = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    seed: Seed = None,
    precision: Precision = None,
    stop_at: StopAt = None,
    overwrite: Overwrite = False,
    settings: Overrides = None,
    dry_run: DryRun = False,
    gpu: Gpu = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train a hybrid that `convert` made to compute what its teacher does, stage by stage, as a run file says.

    The options replace what the file says, those of --set last. An interrupted command continues when it is given again. For
    several GPUs or hosts start it with `torchrun --nproc-per-node N -m fastweights distill ...`, srun or accelerate launch.
    """
    run = run_training(
        "distill",
        run_file,
        output=output,
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        precision=precision,
        stop_at=stop_at,
        overwrite=overwrite,
        settings=settings,
        dry_run=dry_run,
        gpu=gpu,
        quiet=quiet,
        imports=imports,
    )
    report = None if run is None else Path(run.output, "distillation.json")
    if report is not None and report.exists():
        _show_comparison(report)


def _show_comparison(report: Path) -> None:
    """Teacher and student side by side, as a table and a plot."""
    from ..analysis.distillation import distillation_table, save_distillation_plot
    from ..results.distillation import load_distillation

    with one_line_errors():
        result = load_distillation(report)
        Console().print(distillation_table(result))
        if result.kls or result.teacher.perplexities:  # needles are only measured beside these
            show_plots("Plot", partial(save_distillation_plot, result, report.with_suffix(".png")), advice="")
