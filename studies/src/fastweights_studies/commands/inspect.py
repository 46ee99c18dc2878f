"""`fastweights inspect`: what the memories of a trained model do while it reads a text."""

from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.authoring import (
    Device,
    DryRun,
    Imports,
    Overwrite,
    Quiet,
    claim_folder,
    default_output,
    import_mixers,
    one_line_errors,
    output_path,
    show,
    show_plan,
    values,
)

# The names of fastweights_studies.inspection.MEASURES (a test compares them), written out because help must not import torch.
MEASURES = (
    "window, norms, jacobians, writes, keys, preconditioner, gates, metaplasticity, calibration, condition, residuals, "
    "divisors, gradients, slots"
)


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model, or of a training run.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="File or folder with text, may be repeated; by default what the training in MODEL's folder held out.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=output_path, metavar="DIR", help="Folder for the results; inspection in MODEL if not given."
        ),
    ] = None,
    overwrite: Overwrite = False,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read, at most.")] = 1024,
    every: Annotated[int, typer.Option(help="Tokens between two looks at the memory.")] = 64,
    measures: Annotated[
        list[str] | None, typer.Option(metavar="NAME,...", help=f"What to measure: {MEASURES}; all if not given.")
    ] = None,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the file's if not given.")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,  # taken as by the other commands; this one shows no progress
    imports: Imports = None,
) -> None:
    """Show what the memories of a trained model do while it reads a text, by layer and head.

    Writes arrays.npz, one PNG per measure and index.html, a page that needs no network. What does not fit a layer's rule is left
    out.
    """
    with one_line_errors(memory="a smaller --tokens, or a larger --every,"):
        import_mixers(imports)
        from fastweights.checks import check_size
        from fastweights.evaluation.text import HeldOutText
        from fastweights.models.loading import load_language_model, model_folder

        from ..inspection import inspect_model, save_inspection
        from ..inspection.page import written_inspection
        from ..inspection.plan import plan_inspection

        check_size("--tokens", tokens, high=2**30)
        names = values("--measures", measures, str) if measures else None
        model_folder(model, hybrids=False)  # says what is wrong with it, before anything is said of a place in it
        folder = default_output(model, "inspection") if output is None else output
        held_out = HeldOutText(text or (), model)
        if dry_run:
            show_plan(plan_inspection(model, folder, tokens=tokens, every=every, measures=names, text=held_out.name))
            return
        with claim_folder("--output", folder, lambda: written_inspection(folder), "inspection"):
            language_model, tokenizer = load_language_model(model, device=device, dtype=dtype)
            if held_out.notice:
                held_out.find()
                show(held_out.notice, error=True)
            documents = held_out.documents(tokenizer)
            ids = list(islice(chain.from_iterable(documents), tokens))
            if len(ids) < 2:
                raise ValueError(
                    f"the text must have at least 2 tokens to read, {held_out.name} has {len(ids)}; pass a longer one"
                )
            found = inspect_model(language_model, ids, every=every, measures=names)
            facts = {"model": str(model), "text": held_out.name, "tokens": len(ids), "every": every}
            try:
                saved = save_inspection(found, folder, title=f"Memories of {model.resolve().name}", facts=facts)
            except ImportError:
                raise OSError(
                    "matplotlib is missing; pip install 'fastweights[viz]', then give the same command"
                ) from None
    left_out = [name for name in names or () if name not in found.panels]
    if left_out:
        show(f"No layer has what is measured by: {', '.join(left_out)}")
    show(f"Page: {next(path for path in saved if path.suffix == '.html')}")
