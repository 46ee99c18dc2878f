"""`fastweights train`: train language models on text."""

from typing import Annotated

import typer

from ._options import DryRun, Imports, Overrides, Overwrite, Quiet
from ._training import BatchSize, Gpu, LearningRate, MaxSteps, Output, Precision, RunFile, Seed, StopAt, run_training


def train(
    run_file: RunFile,
    output: Output = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    seed: Seed = None,
    precision: Precision = None,
    stop_at: StopAt = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Train the same models and stages at sizes that a CPU trains in minutes, on local text, into OUTPUT-tiny.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    settings: Overrides = None,
    dry_run: DryRun = False,
    gpu: Gpu = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train language models as a run file says: text, tokenizer, model, optimizer.

    The options replace what the file says, those of --set last. An interrupted command continues when it is given again. For
    several GPUs or hosts start it with `torchrun --nproc-per-node N -m fastweights train ...`, srun or accelerate launch.
    """
    run_training(
        "train",
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
        tiny=tiny,
    )
