"""The command `fastweights`: options in, library calls, tables out. No logic of its own.

Bad input ends with one line on stderr and exit code 2, a failure while working with exit code 1, Ctrl-C with 130.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from ._version import __version__
from .analysis import mixers_table, recall_table, save_plots
from .data import TASKS
from .training import RecallExperiment, WorkerError, run_recall
from .training.progress import reporter_for

__all__ = ["app", "main"]

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[
    1
]  # what typer raises for wrong options; it has no public name
Value = TypeVar("Value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on `arguments` (those of the process when None) and return its exit code."""
    try:
        return app(arguments, prog_name="fastweights", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> int:
    print(f"fastweights: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _several(values: Sequence[object]) -> list[str]:
    """The default of an option that takes several values, as it would be typed."""
    return [",".join(map(str, values))]


def _values(option: str, texts: Sequence[str], kind: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of an option that may be repeated and may hold several, separated by commas."""
    values = []
    for text in ",".join(texts).split(","):
        try:
            values.append(kind(text.strip()))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise typer.BadParameter(f"{option} takes {what} separated by commas, got {text.strip()!r}") from None
    return tuple(values)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastweights {__version__}")
        raise typer.Exit


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train and compare fast-weight memory layers.")
DEFAULT = RecallExperiment()
MIXERS, PAIRS = _several(DEFAULT.mixers), _several(DEFAULT.pairs)
LEARNING_RATES, SEEDS = _several(DEFAULT.learning_rates), _several(DEFAULT.seeds)
OUTPUT = Path("runs/recall")


@app.callback()
def _fastweights(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def recall(
    mixers: Annotated[
        list[str], typer.Option(metavar="NAME,...", help="Memory layers to compare; see --list.")
    ] = MIXERS,
    task: Annotated[str, typer.Option(help=f"Recall task: {', '.join(TASKS)}.")] = DEFAULT.task,
    pairs: Annotated[
        list[str], typer.Option(metavar="N,...", help="Difficulties: key-value pairs in a sequence.")
    ] = PAIRS,
    length: Annotated[int | None, typer.Option(help="Tokens in a sequence; the task's shortest if not given.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Number of different tokens.")] = DEFAULT.vocab_size,
    width: Annotated[int, typer.Option(help="Width of the model.")] = DEFAULT.width,
    heads: Annotated[int, typer.Option(help="Heads of a mixer; a head has width / heads channels.")] = DEFAULT.heads,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = DEFAULT.layers,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = DEFAULT.steps,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = DEFAULT.batch_size,
    learning_rates: Annotated[
        list[str],
        typer.Option(metavar="X,...", help="Grid of peak learning rates; the best is reported, all are recorded."),
    ] = LEARNING_RATES,
    seeds: Annotated[
        list[str], typer.Option(metavar="N,...", help="Seeds of parameters and data; the spread is reported.")
    ] = SEEDS,
    test_examples: Annotated[int, typer.Option(help="Held-out sequences to test on.")] = DEFAULT.test_examples,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = DEFAULT.device,
    output: Annotated[Path, typer.Option(help="Folder for results, plots and checkpoints.")] = OUTPUT,
    workers: Annotated[
        int | None, typer.Option(help="Processes, each on one core; by default one a core, one on a GPU.")
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between two saves of a run.")] = 10.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the results in the output folder and begin anew.")
    ] = False,
    list_mixers: Annotated[bool, typer.Option("--list", help="List the memory layers and exit.")] = False,
) -> None:
    """Train models with different memory layers on associative recall and compare them.

    Results go to the output folder: results.json, plots, one file a run. An interrupted command continues when it is given
    again, with the same numbers in the end.
    """
    console = Console()
    if list_mixers:
        console.print(mixers_table())
        return
    try:
        experiment = RecallExperiment(
            mixers=_values("--mixers", mixers, str),
            task=task,
            pairs=_values("--pairs", pairs, int),
            length=length,
            vocab_size=vocab_size,
            width=width,
            heads=heads,
            layers=layers,
            steps=steps,
            batch_size=batch_size,
            learning_rates=_values("--learning-rates", learning_rates, float),
            seeds=_values("--seeds", seeds, int),
            test_examples=test_examples,
            device=device,
        )
        results = run_recall(
            experiment,
            output,
            workers=workers,
            overwrite=overwrite,
            checkpoint_seconds=checkpoint_seconds,
            reporter=reporter_for(Console(stderr=True)),
        )
    except ValueError as error:
        raise typer.Exit(_fail(str(error), 2)) from None
    except WorkerError as error:
        print(error.details, file=sys.stderr, end="")
        raise typer.Exit(_fail(f"{error}; the same command continues where it stopped", 1)) from None
    except KeyboardInterrupt:
        raise typer.Exit(_fail("stopped; the same command continues where it stopped", 130)) from None
    console.print(recall_table(results))
    print(f"Results: {output / 'results.json'}")
    try:
        print("Plots: " + ", ".join(str(path) for path in save_plots(results, output)))
    except ImportError:
        print(
            "No plots: matplotlib is missing; pip install 'fastweights[viz]', then give the same command",
            file=sys.stderr,
        )
