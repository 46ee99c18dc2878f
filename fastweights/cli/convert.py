"""`fastweights convert`: continue a trained model with another memory."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import show
from ._options import DryRun, Imports, Overwrite, Quiet, import_mixers, one_line_errors, output_path
from ._output import show_plan

if TYPE_CHECKING:
    from ..conversion import ConversionReport


def _show_conversions(wanted: bool) -> None:
    if wanted:
        from ..conversion import CONVERSIONS, condition

        for (source, target), conversion in CONVERSIONS.items():
            show(f"{source} -> {target}")
            needed = condition(conversion)
            if needed:
                show(f"    only where the layers of the source have {needed}, which is not {source}'s default")
            show(f"    new parameters: {conversion.first_values}\n    same logits: {conversion.equality}")
        raise typer.Exit


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="The trained model: its folder, that of its training run, or a name on the Hugging Face hub.",
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option(metavar="MIXER", help="The new memory layer; see --list.")],
    output: Annotated[
        Path,
        typer.Option(
            parser=output_path, metavar="FOLDER", help="Folder for the new model; must not exist or be empty."
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the new layer, such as b_scale=0.5; may be repeated."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to compare the logits on; random tokens if not given.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many random tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of new parameters that start from random values.")] = 0,
    peak: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate that the source was trained with, for the run file; if not given that of its run.json, "
            "else the papers' for its size."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps in the run file.")] = 2000,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,  # taken as by the other commands; this one shows no progress
    imports: Imports = None,
    list_conversions: Annotated[
        bool,
        typer.Option("--list", callback=_show_conversions, is_eager=True, help="List the conversions and exit."),
    ] = False,
) -> None:
    """Continue a trained model with another memory layer: same weights, first values for new parameters.

    Starts from models of fastweights, from transformers' Mamba-2 and Qwen3-Next (without attention and experts), and from
    flash-linear-attention's gated_deltanet and delta_net. Shows how far the logits of the two are apart, and saves the model with
    the source's tokenizer and a run file for `fastweights train`.
    """
    with one_line_errors(memory="a smaller --tokens, or a machine with more memory,"):
        import_mixers(imports)
        from transformers.utils.logging import disable_progress_bar

        from ..conversion import convert_folder
        from ..conversion.folder import plan_conversion

        disable_progress_bar()  # of every file that is read or written
        settings: dict[str, Any] = {
            "to": to, "prompt": prompt, "tokens": tokens, "seed": seed, "peak": peak, "steps": steps,
            "options": _named_values(option or []), "overwrite": overwrite,
        }  # fmt: skip
        if dry_run:
            show_plan(plan_conversion(source, output, **settings))
            return
        report = convert_folder(source, output, **settings)
    _show(report, "tokens of the prompt" if prompt is not None else "random tokens")


def _named_values(texts: Sequence[str]) -> dict[str, Any]:
    """Values in JSON; a value that is not JSON is taken as a string."""
    from ..layers.choice import option_value

    named = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--option takes NAME=VALUE, such as b_scale=0.5, got {text!r}")
        named[name] = option_value(value)
    return named


def _show(report: "ConversionReport", kind: str) -> None:
    check = report.check
    for conversion in {id(own): own for own in report.conversions.values()}.values():
        layers = [index for index, own in report.conversions.items() if own is conversion]
        count = f"{len(layers)} of {report.layers}"
        show(f"{conversion.source} -> {conversion.target} in {count} layers: {_ranges(layers)}")
        show(f"  new parameters: {conversion.first_values}")
        show(f"  same logits: {conversion.equality}")
    show(f"{report.parameters:,} parameters, {report.new_parameters:,} of them new")
    show(f"Largest difference of logits over {check.tokens} {kind} (largest logit {check.largest_logit:.3g}):")
    show(
        f"  where they should be equal: {'no such setting' if check.neutral is None else format(check.neutral, '.3g')}"
    )
    show(f"  as saved: {check.saved:.3g}")
    run_file = report.output / "train.toml"
    show(f"Saved in {report.output}, with {', '.join(report.tokenizer) or 'no tokenizer, as the source has none'}")
    if not report.tokenizer:
        show(f"Before training, name the tokenizer of the source under [tokenizer] in {run_file}")
    if report.training is not None:
        show(f"Text, length and batch size of {run_file}: as in {report.training}")
    show(f"Continue: fastweights train {run_file}")


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs = groupby(enumerate(numbers), lambda place: place[1] - place[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(members) for _, members in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
