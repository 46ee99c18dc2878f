"""`fastweights recall`: train and compare memory layers on associative recall."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..stopping import StopSignals
from ..terminal import Console, show
from ._options import (
    AsJson,
    Device,
    DryRun,
    Imports,
    Overrides,
    Overwrite,
    Quiet,
    import_mixers,
    one_line_errors,
    output_path,
    training_errors,
    values,
)
from ._output import one_document, show_plan, show_plots

# The defaults are those of load_recall_file(None) (a test compares them), written out because help must not import torch.
MIXERS, PAIRS = ["linear,gla,deltanet,gdn"], ["4,8"]
LEARNING_RATES, SEEDS = ["0.003,0.01"], ["0"]
LESS_MEMORY = "a smaller --batch-size, or a smaller --workers,"


def recall(
    context: typer.Context,
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.toml]",
            help="File with the settings; options that are given replace what it says. See examples/recall.",
            show_default=False,
        ),
    ] = None,
    mixers: Annotated[
        list[str],
        typer.Option(
            metavar="MIXER,...",
            help="Memory layers to compare: NAME, NAME:OPTION=VALUE,... with options, or NAME:OPTION=VALUE,...@LABEL, as in "
            "gdn,gdn:conv_size=2@small; `fastweights mixers` lists them and their options.",
        ),
    ] = MIXERS,
    task: Annotated[str, typer.Option(help="Task to train on; `fastweights tasks` lists them.")] = "mqar-shuffled",
    pairs: Annotated[
        list[str],
        typer.Option(
            metavar="N,...",
            help="Difficulties: key-value pairs in a sequence. A run file that does not set them has 4,16.",
        ),
    ] = PAIRS,
    block: Annotated[
        str | None,
        typer.Option(
            help="What every memory has around its rule: matched, the same convolutions, gates and first windows for all; "
            "published, the options and the drawn decays of papers; or a key of fastweights.layers.BLOCKS. Options of a mixer go "
            "first.",
            show_default="matched, or with a run file what it says, else published",
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a sequence; the task's shortest if not given.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Number of different tokens.")] = 64,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 32,
    heads: Annotated[int, typer.Option(help="Heads of a mixer; a head has width / heads channels.")] = 2,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 2,
    initializer_range: Annotated[float, typer.Option(help="Standard deviation of the first weights.")] = 0.05,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 600,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = 32,
    learning_rates: Annotated[
        list[str],
        typer.Option(metavar="X,...", help="Grid of peak learning rates; the best is reported, all are recorded."),
    ] = LEARNING_RATES,
    seeds: Annotated[
        list[str], typer.Option(metavar="N,...", help="Seeds of parameters and data; the spread is reported.")
    ] = SEEDS,
    test_examples: Annotated[int, typer.Option(help="Held-out sequences to test on.")] = 1024,
    validation_examples: Annotated[
        int | None,
        typer.Option(
            help="Held-out sequences, others than the tested ones, by which the learning rate is chosen.",
            show_default="256, or with a run file what it says, else the tested ones",
        ),
    ] = None,
    device: Device = "cpu",
    output: Annotated[
        Path, typer.Option(parser=output_path, metavar="FOLDER", help="Folder for results, plots and checkpoints.")
    ] = Path("runs/recall"),
    workers: Annotated[
        int | None, typer.Option(help="Processes, each on one core; by default one per core, or one per GPU.")
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between two saves of a run.")] = 10.0,
    log_every: Annotated[
        int, typer.Option(help="Steps of a run between two lines of progress where there is no terminal.")
    ] = 100,
    overwrite: Overwrite = False,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    imports: Imports = None,
    list_mixers: Annotated[
        bool, typer.Option("--list", help="List the memory layers and exit, as `fastweights mixers` does.")
    ] = False,
) -> None:
    """Train models with different memory layers on associative recall and compare them.

    Results go to the output folder: results.json, plots, one file per run. An interrupted command continues when it is given
    again, with the same numbers in the end.
    """
    continues = f"the same command{' without --overwrite' * overwrite} continues where it stopped"
    with one_document(as_json) as give_document:
        with one_line_errors(continues, LESS_MEMORY), StopSignals():
            import_mixers(imports)
            from ..analysis import mixers_table, recall_table, save_plots, stage_table
            from ..layers import parse_mixers
            from ..training import load_recall_file, run_recall_parts
            from ..training.progress import RunsProgress
            from ..training.recall.folder import ExperimentFolder
            from ..training.recall.run import plan_recall

            if list_mixers and as_json:
                raise ValueError("--json must be left out with --list, which shows a table; drop one of the two")
            if list_mixers:
                Console().print(mixers_table())
                return
            settings: dict[str, Any] = {
                "mixers": tuple(choice for text in mixers for choice in parse_mixers(text)),
                "task": task,
                "pairs": values("--pairs", pairs, int),
                "block": block,
                "length": length,
                "vocab_size": vocab_size,
                "width": width,
                "heads": heads,
                "layers": layers,
                "initializer_range": initializer_range,
                "steps": steps,
                "batch_size": batch_size,
                "learning_rates": values("--learning-rates", learning_rates, float),
                "seeds": values("--seeds", seeds, int),
                "test_examples": test_examples,
                "validation_examples": validation_examples,
                "device": device,
            }
            options = {**settings, "output": str(output), "workers": workers}
            given = {name: value for name, value in options.items() if _is_given(context, name)}
            study = load_recall_file(run_file, overrides=overrides or (), **given)
            folders = study.folders()
            if dry_run:
                (give_document if as_json else show_plan)(
                    {"parts": plan_recall(study.parts, folders, overwrite=overwrite)}
                )
                return
            with training_errors(continues):
                found = run_recall_parts(
                    study.parts,
                    folders,
                    workers=study.workers,
                    overwrite=overwrite,
                    checkpoint_seconds=checkpoint_seconds,
                    reporter=RunsProgress(Console(stderr=True, quiet=quiet), log_every),
                    log_every=log_every,
                    imports=imports or (),
                )
        for name, results in found.items():
            if name:
                show(f"Part {name}")
            Console().print(recall_table(results))
            if study.parts[name].curriculum:
                Console().print(stage_table(results))
            show(f"Results: {folders[name] / 'results.json'}")
            with one_line_errors(), ExperimentFolder(folders[name]).locked():
                show_plots("Plots", partial(save_plots, results, folders[name]))
        if as_json:
            documents = {name: json.loads((folder / "results.json").read_bytes()) for name, folder in folders.items()}
            give_document(documents.get("", documents))


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether a person gave the option; otherwise it has its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
