"""`fastweights evaluate`: what a trained text model can do, by context length."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..evaluation.evaluate import MEASURES, EvaluationSettings
from ._options import several, told, values

DEFAULT = EvaluationSettings()
LENGTHS, DEPTHS = several(DEFAULT.lengths), several(DEFAULT.depths)


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model, or of a training run.")],
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help=f"What to measure: {', '.join(MEASURES)}; perplexity if not given."),
    ] = None,
    lengths: Annotated[list[str], typer.Option(metavar="N,...", help="Context lengths in tokens.")] = LENGTHS,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="File or folder with held-out text, may be repeated; by default the part of the Python installation's "
            "source that `fastweights train` holds out.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Where results go; evaluation.json in MODEL if not given.")
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts that perplexity is measured on, at most.")] = DEFAULT.texts,
    stretch: Annotated[
        int, typer.Option(help="Tokens before a length that the perplexity of the last tokens is over.")
    ] = DEFAULT.stretch,
    pairs: Annotated[
        int, typer.Option(help="Pairs (or tokens to copy) of the recall tasks, at every length.")
    ] = DEFAULT.pairs,
    symbols: Annotated[int, typer.Option(help="Words that the recall tasks are made of.")] = DEFAULT.symbols,
    recall_examples: Annotated[
        int, typer.Option(help="Sequences of a recall task at a length.")
    ] = DEFAULT.recall_examples,
    needle_examples: Annotated[
        int, typer.Option(help="Texts with a needle at a length and depth.")
    ] = DEFAULT.needle_examples,
    depths: Annotated[
        list[str], typer.Option(metavar="X,...", help="Where in the text the needle is, 0 to 1.")
    ] = DEPTHS,
    seed: Annotated[int, typer.Option(help="Seed of recall tasks and needles.")] = DEFAULT.seed,
    block: Annotated[int, typer.Option(help="Tokens read at a time; memory goes with it.")] = DEFAULT.block,
    batch_size: Annotated[int, typer.Option(help="Texts read side by side.")] = DEFAULT.batch_size,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the file's if not given.")] = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK,...", help="Tasks of lm-evaluation-harness (pip install 'fastweights[eval]')."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with lm-evaluation-harness tasks of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each --lm-eval task, at most.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question of --lm-eval.")] = None,
) -> None:
    """Measure a trained text model: perplexity by context length, recall, retrieval of needles, lm-evaluation-harness.

    Texts are read in blocks, so that memory does not grow with the context length. Results are saved as they come; a file that
    is there is replaced.
    """
    with told():
        from ..analysis.evaluation_tables import evaluation_tables
        from ..evaluation import load_language_model
        from ..evaluation.evaluate import evaluate as measurements
        from ..evaluation.report import EvaluationReport
        from ..evaluation.text import HeldOutText

        settings = EvaluationSettings(
            measures=() if lm_eval and not on else values("--on", on or DEFAULT.measures, str),
            lengths=values("--lengths", lengths, int),
            texts=texts,
            stretch=stretch,
            batch_size=batch_size,
            pairs=pairs,
            symbols=symbols,
            recall_examples=recall_examples,
            needle_examples=needle_examples,
            depths=values("--depths", depths, float),
            seed=seed,
            block=block,
        )
        harness = _harness() if lm_eval is not None else None
        language_model, tokenizer = load_language_model(model, device=device, dtype=dtype)
        held_out = HeldOutText(text or ())
        output = model / "evaluation.json" if output is None else output
        report = EvaluationReport(output, model=language_model, name=str(model), settings=settings, text=held_out.name)
        if harness is not None:
            scores = harness(
                language_model,
                tokenizer,
                values("--lm-eval", lm_eval or (), str),
                include_path=include_path,
                limit=limit,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                seed=seed,
            )
            report.add("lm-eval", scores)
        documents, haystack = held_out.documents(tokenizer), held_out.haystack()
        with Console(stderr=True).status("Measuring") as status:
            for measure, rows in measurements(language_model, tokenizer, settings, documents=documents, text=haystack):
                report.add(measure, rows)
                status.update(f"Measuring; done: {measure} at {rows[-1].length:,} tokens")
    console = Console()
    for table in evaluation_tables(report.results):
        console.print(table)
    print(f"Results: {output}")
    if "perplexity" in report.results:
        _plot(report.results["perplexity"], model.resolve().name, output.with_name(f"{output.stem}-perplexity.png"))


def _harness() -> Any:
    try:
        from ..evaluation.harness import evaluate_with_harness
    except ImportError:
        raise ValueError("--lm-eval needs lm-evaluation-harness; pip install 'fastweights[eval]'") from None
    return evaluate_with_harness


def _plot(rows: Any, name: str, path: Path) -> None:
    from ..analysis.perplexity_plot import save_perplexity_plot

    try:
        save_perplexity_plot({name: rows}, path)
        print(f"Plot: {path}")
    except ImportError:
        print(
            "No plot: matplotlib is missing; pip install 'fastweights[viz]', then give the same command",
            file=sys.stderr,
        )
