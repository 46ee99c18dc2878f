"""`fastweights leaderboard`: every memory on the same tasks."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..stopping import StopSignals
from ._options import Imports, fail, import_mixers, one_line_errors, values

# Those of fastweights.leaderboard (a test compares them), written out because help must not import torch.
PARTS = "mqar, regression, tracking, language, needle, training-speed, decoding-speed, memory, rules"


def leaderboard(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="[PART]...", help=f"Parts to run: {PARTS}.", show_default=False)
    ] = None,
    list_parts: Annotated[
        bool, typer.Option("--list", help="List the parts, their cost and how many mixers have results, and exit.")
    ] = False,
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIXER,...",
            help="Memory layers that take part, as for `fastweights recall`; all of the registry if not given. Others keep "
            "the results that the output folder has.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="small or full; small on a CPU and full on a GPU if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = "cpu",
    seeds: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="Seeds; those of the size if not given.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results and trainings.")] = Path("runs/leaderboard"),
    measurements: Annotated[
        Path, typer.Option(help="Folder with the benchmarks' result files, for speed and memory.")
    ] = Path("benchmarks/results"),
    workers: Annotated[
        int | None, typer.Option(help="Trainings at the same time; by default one per core, or 8 per GPU.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Compare memory layers on the same tasks, at equal state size and equal parameters.

    Every run is kept as soon as it has ended: an interrupted command continues when it is given again, and a mixer of your own
    joins the results that are there by its name (--mixers NAME --import MODULE).
    """
    with one_line_errors("the same command continues where it stopped"), StopSignals():
        import_mixers(imports)
        from ..checks import check_choice, check_size, check_whole_number
        from ..files import check_place
        from ..layers import MIXERS, MixerChoice, parse_mixers
        from ..leaderboard import PARTS, SIZES, Request, find_part, part_rows, run_part, table_of
        from ..leaderboard.terminal import parts_table, plain
        from ..training import WorkerError
        from ..training.progress import reporter_for
        from ..training.settings import check_device

        chosen = [find_part(name) for name in parts or ()]
        size = size or ("small" if device == "cpu" else "full")
        check_choice("--size", size, SIZES)
        if list_parts:
            Console().print(parts_table(chosen or list(PARTS.values()), size, output, measurements))
            return
        if not chosen:
            raise ValueError("name at least one part, or pass --list, which shows the parts")
        check_device(device)
        check_place("--output", output)
        if workers is not None:
            check_size("--workers", workers, high=1024)
        given = values("--seeds", seeds, int) if seeds else None
        for seed in given or ():
            check_whole_number("--seeds", seed)
        if given and len(set(given)) < len(given):
            raise ValueError(
                f"--seeds must differ from each other, got {', '.join(map(str, given))}; drop what is there twice"
            )
        choices = (
            tuple(choice for text in mixers for choice in parse_mixers(text))
            if mixers
            else tuple(map(MixerChoice, MIXERS))
        )
        labels = [choice.label for choice in choices]
        repeated = {label for label in labels if labels.count(label) > 1}
        if repeated:
            raise ValueError(f"--mixers must differ from each other, but {min(repeated)!r} is there twice; drop one")
        request = Request(
            mixers=choices, size=size, device=device, output=output, seeds=given, workers=workers,
            imports=tuple(imports or ()), reporter=reporter_for(Console(stderr=True)),
        )  # fmt: skip
        for part in chosen:
            try:
                path = run_part(part, request)
            except WorkerError as error:
                print(error.details, file=sys.stderr, end="")
                raise typer.Exit(fail(f"{error}; the same command continues where it stopped", 1)) from None
            rows = part_rows(part, size, output, measurements)
            Console().print(plain(part, *table_of(part, size, rows, labels)))
            if path is not None:
                print(f"Results: {path}\n")
