"""What `train` and `distill` have in common: their options, and a training from its run file to its tables and plots."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..stopping import StopSignals
from ..terminal import Console, show
from ._options import fail, import_mixers, one_line_errors
from ._output import show_plan, show_plots

LESS_MEMORY = "a smaller batch_size with a larger accumulation, or gradient_checkpointing = true,"

RunFile = Annotated[Path, typer.Argument(help="The run: a .toml file, or a .py file that defines `run`.")]
Output = Annotated[str | None, typer.Option(help="Folder for checkpoints, results and the model.")]
MaxSteps = Annotated[int | None, typer.Option(help="Optimizer steps.")]
BatchSize = Annotated[int | None, typer.Option(help="Rows that a process reads at a time.")]
LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int | None, typer.Option(help="Seed of first weights and data order.")]
Precision = Annotated[str | None, typer.Option(help="no, bf16 or fp16.")]
StopAt = Annotated[
    int | None,
    typer.Option(help="End after this step with a checkpoint; without this option the same command continues."),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="[N x]NAME",
        help="With --dry-run: plan for this GPU, such as h100 or 8xh100, and estimate the time; refuse what cannot fit.",
    ),
]


def run_training(
    command: str,
    run_file: Path,
    *,
    stop_at: int | None,
    overwrite: bool,
    settings: Sequence[str] | None,
    dry_run: bool,
    gpu: str | None,
    quiet: bool,
    imports: Sequence[str] | None,
    tiny: bool = False,
    **changes: Any,
) -> Any:
    """Carry out `train` or `distill`; the run, where it has ended and this process shows it. changes: fields of the run that
    replace those of the file, None for none."""
    try:
        from accelerate import PartialState
        from transformers.utils.logging import disable_progress_bar

        from ..analysis.language_plots import save_language_plots
        from ..analysis.tables import language_tables
        from ..distillation import DistillRun, distill
        from ..distillation.distill import plan_distillation
        from ..training.language import LanguageRun, NonFiniteLoss, load_run, train_language
        from ..training.language.folder import LanguageFolder
        from ..training.language.joining import joined, voice
        from ..training.language.planning import plan_training
        from ..training.language.processes import from_main_process, on_every_process
    except ImportError as error:
        raise typer.Exit(fail(f"training needs {error.name}; pip install 'fastweights[train]'", 1)) from None

    disable_progress_bar()  # the command shows its own, not one per saved file
    kinds: dict[str, Any] = {
        "train": (LanguageRun, train_language, plan_training),
        "distill": (DistillRun, distill, plan_distillation),
    }
    kind, work, plan = kinds[command]
    again = "the same command without --overwrite" if overwrite else "the same command"
    continues = f"{again} continues after the last checkpoint"
    try:
        with (
            one_line_errors(continues, LESS_MEMORY, voice),
            StopSignals() as signals,
            nullcontext() if dry_run else joined(),
        ):
            given = {name: value for name, value in changes.items() if value is not None}

            def load() -> Any:
                import_mixers(imports)
                if gpu is not None and not dry_run:
                    raise ValueError("--gpu is for a plan; give --dry-run with it, or leave it out")
                return load_run(run_file, overrides=settings or (), tiny=tiny, kind=kind, **given)

            if dry_run:
                show_plan(plan(load(), stop_at=stop_at, overwrite=overwrite, gpu=gpu))
                return None
            run = on_every_process(load)
            console = Console(stderr=True, quiet=quiet)
            results = work(run, stop_at=stop_at, overwrite=overwrite, console=console, signals=signals)
            from_main_process(None)  # which has measured a model while the others wait
            PartialState().wait_for_everyone()  # gloo may abort where one process still talks to another that has left
            PartialState().destroy_process_group()
    except NonFiniteLoss as error:
        raise typer.Exit(fail(str(error), 1, voice())) from None
    if results is None:
        return None
    Console().print(*language_tables(results), sep="\n")
    for result in results:
        if result.continuation is not None:
            show(f"{result.label} continues {run.prompt!r} with:\n{result.continuation}\n")
    show("Models: " + ", ".join(result.folder for result in results))
    with one_line_errors(), LanguageFolder(Path(run.output)).locked():
        show_plots("Plots", partial(save_language_plots, results, Path(run.output)), advice="")
    return run
