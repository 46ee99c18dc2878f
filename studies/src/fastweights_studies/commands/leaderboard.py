"""`fastweights leaderboard`: every memory on the same tasks."""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.authoring import (
    Console,
    Device,
    DryRun,
    Imports,
    Overwrite,
    Quiet,
    StopSignals,
    import_mixers,
    one_line_errors,
    output_path,
    show,
    show_plan,
    training_errors,
)

from ._options import FEWER, Minutes, Workers, check_trainings, stopping_after

# Those of fastweights_studies.leaderboard (a test compares them), written out because help must not import torch.
PARTS = (
    "recall, recall-published, recall-blocks, tasks, regression-matched, mqar, regression, tracking, language-proxies, "
    "language-matched, hybrids, language, training-speed, decoding-speed, memory, rules"
)
CONTINUES = "the same command continues where it stopped"


def leaderboard(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help=f"Parts to run: {PARTS}; or a task of your own.", show_default=False),
    ] = None,
    list_parts: Annotated[
        bool, typer.Option("--list", help="List the parts, their cost and how many mixers have results, and exit.")
    ] = False,
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIXER,...",
            help="Memory layers that take part, as for `fastweights recall`; all of the registry if not given. Others keep "
            "the results that the output folder or the library has.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="small or full; small on a CPU and full on a GPU if not given.")
    ] = None,
    device: Device = "cpu",
    seeds: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="Seeds; those of the size if not given.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="TEXT",
            help="Train in the columns with this text in their title alone, such as 'heads of 32'; may be repeated. "
            "Others keep the results that they have.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(parser=output_path, metavar="FOLDER", help="Folder for results and trainings.")
    ] = Path("runs/leaderboard"),
    overwrite: Overwrite = False,
    measurements: Annotated[
        Path, typer.Option(help="Folder with the result files of measuring scripts, for speed and memory.")
    ] = Path("studies/results"),
    workers: Workers = None,
    minutes: Minutes = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Compare memory layers on the same tasks, at equal state size and equal parameters.

    Every run is kept as soon as it has ended: an interrupted command continues when it is given again, and a mixer of your own
    joins the results that are there by its name (--mixers NAME --import MODULE). Mixers without results of yours are shown with
    those that the library comes with. Speed and memory are read from the files of scripts; what these lack is named with
    the command that measures it.
    """
    with one_line_errors(CONTINUES, FEWER), StopSignals(), stopping_after(minutes):
        import_mixers(imports)
        from fastweights.checks import check_choice
        from fastweights.layers import MIXERS, MixerChoice, parse_mixers
        from fastweights.layers.choice import check_backend
        from fastweights.training.progress import RunsProgress

        from ..leaderboard import SIZES, Request, find_part, known_parts, run_part, table_of
        from ..leaderboard.run import claim_boards, plan_part
        from ..leaderboard.tables import describe_visible
        from ..leaderboard.terminal import describe_origins, make_table, parts_table

        chosen = [find_part(name) for name in parts or ()]
        size = size or ("small" if device == "cpu" else "full")
        check_choice("--size", size, SIZES)
        if list_parts:
            Console().print(parts_table(chosen or list(known_parts().values()), size, output, measurements))
            return
        if not chosen:
            raise ValueError("name at least one part, or pass --list, which shows the parts")
        given = check_trainings(device, output, workers, seeds)
        choices = (
            tuple(choice for text in mixers for choice in parse_mixers(text))
            if mixers
            else tuple(map(MixerChoice, MIXERS))
        )
        labels = [choice.label for choice in choices]
        repeated = {label for label in labels if labels.count(label) > 1}
        if repeated:
            raise ValueError(f"--mixers must differ from each other, but {min(repeated)!r} is there twice; drop one")
        for choice in choices:
            check_backend(choice.name, choice.options, device)
        request = Request(
            mixers=choices, size=size, device=device, output=output, seeds=given,
            columns=tuple(columns) if columns else None, workers=workers, imports=tuple(imports or ()),
            reporter=RunsProgress(Console(stderr=True, quiet=quiet)),
        )  # fmt: skip
        for part in chosen:
            part.check_columns(request)
        with claim_boards("--output", chosen, request):
            if dry_run:
                show_plan({"part": [plan_part(part, request) for part in chosen]})
                return
            for part in chosen:
                if overwrite:
                    part.forget(request)
                with training_errors(CONTINUES):
                    path = run_part(part, request)
                rows = part.rows(size, output, measurements)
                library = part.library(size, rows)
                Console().print(make_table(part, *table_of(part, size, [*library, *rows], labels)))
                if visible := describe_visible(part, part.entries([*library, *rows])):
                    show(visible)
                show(describe_origins(part, library, output), end="")
                if path is not None:
                    show(f"Results: {path}\n")
                elif how := part.how_to_measure(labels, rows, imports or (), measurements):
                    show(how)
