"""`fastweights train`: train language models on text."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..stopping import StopSignals
from ..terminal import Console, show
from ._options import DryRun, Imports, Overrides, Overwrite, Quiet, fail, import_mixers, one_line_errors
from ._output import show_plan, show_plots

LESS_MEMORY = "a smaller batch_size with a larger accumulation, or gradient_checkpointing = true,"


def train(
    run_file: Annotated[Path, typer.Argument(help="The run: a .toml file, or a .py file that defines `run`.")],
    output: Annotated[str | None, typer.Option(help="Folder for checkpoints, results and the model.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows that a process reads at a time.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of first weights and data order.")] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    stop_at: Annotated[
        int | None,
        typer.Option(help="End after this step with a checkpoint; without this option the same command continues."),
    ] = None,
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
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="[N x]NAME",
            help="With --dry-run: plan for this GPU, such as h100 or 8xh100, and estimate the time; refuse what cannot fit.",
        ),
    ] = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train language models as a run file says: text, tokenizer, model, optimizer.

    The options replace what the file says, those of --set last. An interrupted command continues when it is given again. For
    several GPUs or hosts start it with `torchrun --nproc-per-node N -m fastweights train ...`, srun or accelerate launch.
    """
    try:
        from accelerate import PartialState
        from transformers.utils.logging import disable_progress_bar

        from ..analysis.language_plots import save_language_plots
        from ..analysis.tables import language_tables
        from ..training.language import LanguageRun, NonFiniteLoss, load_run, train_language
        from ..training.language.folder import LanguageFolder
        from ..training.language.joining import joined, voice
        from ..training.language.planning import plan_training
        from ..training.language.processes import from_main_process, on_every_process
    except ImportError as error:
        raise typer.Exit(fail(f"training needs {error.name}; pip install 'fastweights[train]'", 1)) from None

    disable_progress_bar()  # the command shows its own, not one per saved file
    options: dict[str, Any] = {
        "output": output,
        "max_steps": max_steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "precision": precision,
    }
    command = "the same command without --overwrite" if overwrite else "the same command"
    continues = f"{command} continues after the last checkpoint"
    try:
        with (
            one_line_errors(continues, LESS_MEMORY, voice),
            StopSignals() as signals,
            nullcontext() if dry_run else joined(),
        ):
            given = {name: value for name, value in options.items() if value is not None}

            def load() -> LanguageRun:
                import_mixers(imports)
                if gpu is not None and not dry_run:
                    raise ValueError("--gpu is for a plan; give --dry-run with it, or leave it out")
                return load_run(run_file, overrides=settings or (), tiny=tiny, **given)

            if dry_run:
                show_plan(plan_training(load(), stop_at=stop_at, overwrite=overwrite, gpu=gpu))
                return
            run = on_every_process(load)
            results = train_language(
                run, stop_at=stop_at, overwrite=overwrite, console=Console(stderr=True, quiet=quiet), signals=signals
            )
            from_main_process(None)  # which has measured a model while the others wait
            PartialState().wait_for_everyone()  # gloo may abort where one process still talks to another that has left
            PartialState().destroy_process_group()
    except NonFiniteLoss as error:
        raise typer.Exit(fail(str(error), 1, voice())) from None
    if results is None:
        return
    Console().print(*language_tables(results), sep="\n")
    for result in results:
        if result.continuation is not None:
            show(f"{result.label} continues {run.prompt!r} with:\n{result.continuation}\n")
    show("Models: " + ", ".join(result.folder for result in results))
    with one_line_errors(), LanguageFolder(Path(run.output)).locked():
        show_plots("Plots", partial(save_language_plots, results, Path(run.output)), advice="")
