"""`fastweights convert`: continue a trained model with another memory."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import Console, show
from ._options import DryRun, Imports, Overwrite, Quiet, import_mixers, one_line_errors, output_path
from ._output import show_plan, show_plots

if TYPE_CHECKING:
    from ..conversion import ConversionReport, LinearizationReport
    from ..distillation import SelectionSettings


def _show_conversions(wanted: bool) -> None:
    if wanted:
        from ..conversion import CONVERSIONS, condition
        from ..models.hybrid import FAMILIES

        for (source, target), conversion in CONVERSIONS.items():
            show(f"{source} -> {target}")
            needed = condition(conversion)
            if needed:
                show(f"    only where the layers of the source have {needed}, which is not {source}'s default")
            show(f"    new parameters: {conversion.first_values}\n    same logits: {conversion.equality}")
        show(f"attention of {', '.join(FAMILIES)} -> any memory layer that takes q, k and v")
        show("    in all layers but those of --keep; `fastweights distill` then trains the hybrid")
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
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Of a pretrained Transformer: layers that keep their attention, such as 6,14,22, every:4 (the last of "
            "every four), all or none, or auto:4 for the four with which the hybrid is nearest to it; none if not given.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out text for --keep auto:N, a file or folder; may be repeated.", show_default=False),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Tokens of that text read per layer, at most; 65,536 if not given.")
    ] = None,
    rank_after: Annotated[
        int | None,
        typer.Option(
            help="Steps by which the memories learn what attention gave before --keep auto:N ranks layers; 0 if not given."
        ),
    ] = None,
    run_file: Annotated[
        Path | None,
        typer.Option(
            help="A .toml file with the budget of --keep auto:N in a table [selection], such as the distill.toml of another "
            "conversion; --budget and --rank-after replace its tokens and training_steps.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help="Of a pretrained Transformer: shared, where query heads share the weights of a key and value head as in the "
            "attention, or repeated, where each gets a copy; shared if not given.",
        ),
    ] = None,
    no_rope: Annotated[
        bool, typer.Option("--no-rope", help="Of a pretrained Transformer: memories get q and k without rotation.")
    ] = False,
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
    steps: Annotated[int, typer.Option(help="Training steps in the run file, of each of its stages.")] = 2000,
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

    A pretrained Transformer (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, SmolLM3, OLMo-2, Gemma-2, Gemma-3) becomes a hybrid, with
    memories in place of attention in all layers but those of --keep, and a run file for `fastweights distill`.
    """
    with one_line_errors(memory="a smaller --tokens, or a machine with more memory,"):
        import_mixers(imports)
        from transformers.utils.logging import disable_progress_bar

        from ..conversion import convert_folder, linearize_folder
        from ..conversion.folder import plan_conversion, source_type
        from ..conversion.linearized_folder import plan_linearization
        from ..distillation import auto_layers
        from ..models.hybrid import FAMILIES

        disable_progress_bar()  # of every file that is read or written
        settings: dict[str, Any] = {
            "to": to, "prompt": prompt, "tokens": tokens, "seed": seed, "steps": steps,
            "options": _named_values(option or []), "overwrite": overwrite,
        }  # fmt: skip
        of_attention = {"--keep": keep, "--keys": keys, "--no-rope": no_rope or None}
        has_attention = source_type(source) in FAMILIES
        for name, given in of_attention.items() if not has_attention else [("--peak", peak)]:
            if given is not None:
                kind = "model with a memory" if has_attention else f"pretrained Transformer ({', '.join(FAMILIES)})"
                raise ValueError(f"{name} must be left out unless SOURCE is a {kind}, got {given}")
        ranks = (keep or "").startswith("auto:")
        of_ranking = {
            "--text": " ".join(map(str, text or ())) or None, "--budget": budget, "--rank-after": rank_after,
            "--run-file": run_file,
        }  # fmt: skip
        for name, value in of_ranking.items():
            if value is not None and not ranks:
                raise ValueError(f"{name} must be left out unless --keep is auto:N, got {value}")
        if has_attention:
            settings |= {"keep": "none" if keep is None else keep, "keys": keys or "shared", "rope": not no_rope}
            if ranks:
                selection = _read_budget(run_file, tokens=budget, training_steps=rank_after)
                planned = plan_linearization(source, output, **{**settings, "keep": "none"})  # checks all that it can
                count = auto_layers(settings["keep"], len(planned["layers with a memory"]))
                settings["keep"] = range(count or 0)
                if not dry_run:
                    console = Console(stderr=True, quiet=quiet)
                    settings["keep"] = _rank_layers(
                        source, count or 0, output, text or [], selection, console, settings
                    )
                    settings["selection"] = selection.record()
        else:
            settings["peak"] = peak
        if dry_run:
            plan = (plan_linearization if has_attention else plan_conversion)(source, output, **settings)
            if ranks:
                plan |= {
                    "layers with a memory": "the others",
                    "layers with attention": f"{keep}, ranked on held-out text",
                    "budget of the ranking": selection.record(),
                }
            show_plan(plan)
            return
        kind = "tokens of the prompt" if prompt is not None else "random tokens"
        if has_attention:
            _show_hybrid(linearize_folder(source, output, **settings), kind)
        else:
            _show(convert_folder(source, output, **settings), kind)


def _read_budget(run_file: Path | None, **given: int | None) -> "SelectionSettings":
    """That of the table [selection] of a run file, with what is `given` in place of its fields."""
    from ..checks import error_prefix
    from ..distillation.selection import read_selection
    from ..training.run_files import check_run_file, read_toml

    table: Any = {}
    if run_file is not None:
        table = read_toml(check_run_file(run_file, ".toml")).get("selection")
        if table is None:
            raise ValueError(f"run file {run_file} must have a table [selection], the budget of --keep auto:N; add it")
    with error_prefix(f"run file {run_file}") if run_file is not None else nullcontext():
        settings = read_selection(table)
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _rank_layers(
    source: str,
    count: int,
    output: Path,
    text: list[Path],
    selection: "SelectionSettings",
    console: Console,
    settings: dict[str, Any],
) -> tuple[int, ...]:
    """The `count` layers that are best kept, ranked on held-out text. Table and picture say it too."""
    from ..analysis.distillation import ranking_table, save_ranking_plot
    from ..distillation.choice import rank_saved_layers
    from ..evaluation.text import HeldOutText

    held_out = HeldOutText(text, Path(source) if Path(source).is_dir() else None)
    if held_out.notice:
        held_out.find()
        show(held_out.notice, error=True)
    folder = output.with_name(f"{output.name}-layers")
    choices = {name: settings[name] for name in ("to", "keys", "rope", "seed", "options")}
    ranking = rank_saved_layers(source, folder, text=held_out, settings=selection, console=console, **choices)
    kept = ranking.best(count)
    Console().print(ranking_table(ranking, kept))
    show(f"Text: {held_out.name}")
    show_plots("Ranking of layers", lambda: save_ranking_plot(ranking, folder / "layers.png", kept))
    return kept


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
    _show_saved(report, run_file)
    if report.training is not None:
        show(f"Text, length and batch size of {run_file}: as in {report.training}")
    show(f"Continue: fastweights train {run_file}")


def _show_hybrid(report: "LinearizationReport", kind: str) -> None:
    count = len(report.converted) + len(report.kept)
    show(
        f"attention -> {report.to} in {len(report.converted)} of {count} layers: {_ranges(report.converted) or 'none'}"
    )
    show(f"attention kept in {len(report.kept)} of {count} layers: {_ranges(report.kept) or 'none'}")
    for line in report.first_values:
        show(f"  {line}")
    show(f"{report.parameters:,} parameters, {report.new_parameters:,} of them new")
    for length, (own, teacher) in report.state.items():
        show(f"Cache after {length:,} tokens: {own:,} numbers per sequence, the source's {teacher:,}")
    check = report.check
    show(
        f"Largest difference of logits over {check.tokens} {kind}: {check.saved:.3g} (largest logit {check.largest_logit:.3g})"
    )
    run_file = report.output / "distill.toml"
    _show_saved(report, run_file)
    show(f"Train: fastweights distill {run_file}")


def _show_saved(report: "ConversionReport | LinearizationReport", run_file: Path) -> None:
    show(f"Saved in {report.output}, with {', '.join(report.tokenizer) or 'no tokenizer, as the source has none'}")
    if not report.tokenizer:
        show(f"Before training, name the tokenizer of the source under [tokenizer] in {run_file}")


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs = groupby(enumerate(numbers), lambda place: place[1] - place[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(members) for _, members in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
