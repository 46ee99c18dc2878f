"""`fastweights distill`: train a converted model to compute what its teacher does."""

from ._options import DryRun, Imports, Overrides, Overwrite, Quiet
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
    changes = {
        "output": output,
        "max_steps": max_steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "precision": precision,
    }
    run_training(
        "distill",
        run_file,
        changes,
        stop_at=stop_at,
        overwrite=overwrite,
        settings=settings,
        dry_run=dry_run,
        gpu=gpu,
        quiet=quiet,
        imports=imports,
    )
