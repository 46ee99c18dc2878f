"""`fastweights evaluate`: what a trained text model can do, by context length."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal import Console, show
from ._options import (
    AsJson,
    Device,
    DryRun,
    Imports,
    Overwrite,
    Quiet,
    import_mixers,
    one_line_errors,
    output_path,
    values,
)
from ._output import one_document, show_plan, show_plots

# As in fastweights.evaluation (tests compare them), written out because help must not import torch.
MEASURES = (
    "perplexity, mqar, mqar-shuffled, copy, palindrome, s-niah-1, s-niah-2, s-niah-3, mk-niah-1, mk-niah-2, mk-niah-3, "
    "mv-niah, mq-niah, vt, cwe, fwe"
)
SUITES = "commonsense, recall, longbench, ruler, helmet-recall, many-shot"
LENGTHS, DEPTHS = ["512,1024,2048,4096,8192,16384"], ["0.0,0.25,0.5,0.75,1.0"]


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model, or of a training run.")],
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help=f"What to measure: {MEASURES}, or a task of your own in words; perplexity if not given.",
        ),
    ] = None,
    lengths: Annotated[list[str], typer.Option(metavar="N,...", help="Context lengths in tokens.")] = LENGTHS,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="File or folder with held-out text, may be repeated; by default what the training in MODEL's folder held "
            "out. Where there is none, part of the Python installation's source, which MODEL may have been trained on.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=output_path, metavar="FILE.json", help="Where results go; evaluation.json in MODEL if not given."
        ),
    ] = None,
    overwrite: Overwrite = False,
    texts: Annotated[int, typer.Option(help="Texts that perplexity is measured on, at most.")] = 16,
    stretch: Annotated[
        int, typer.Option(help="Tokens before a length that the perplexity of the last tokens is over.")
    ] = 256,
    pairs: Annotated[int, typer.Option(help="Pairs (or tokens to copy) of the recall tasks, at every length.")] = 8,
    symbols: Annotated[int, typer.Option(help="Words that the recall tasks are made of.")] = 64,
    recall_examples: Annotated[int, typer.Option(help="Sequences of a recall task at a length.")] = 64,
    needle_examples: Annotated[int, typer.Option(help="Texts with a needle at a length and depth.")] = 4,
    ruler_examples: Annotated[int, typer.Option(help="Texts of another RULER task at a length.")] = 16,
    depths: Annotated[
        list[str], typer.Option(metavar="X,...", help="Where in the text the needle is, 0 to 1.")
    ] = DEPTHS,
    seed: Annotated[int, typer.Option(help="Seed of recall and RULER tasks.")] = 0,
    block: Annotated[int, typer.Option(help="Tokens read at a time; memory grows with it.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Texts read at a time.")] = 1,
    context_parallel: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Processes that read every text together, a part each, for perplexity, needles and RULER at lengths that one "
            "GPU cannot hold; start them with torchrun --nproc-per-node N -m fastweights evaluate.",
        ),
    ] = 1,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the file's if not given.")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    imports: Imports = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK,...", help="Tasks of lm-evaluation-harness (pip install 'fastweights[eval]')."),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help=f"Suites of such tasks, beside what papers print of them: {SUITES}."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with lm-evaluation-harness tasks of your own.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Examples of each task of the harness, at most; of RULER, at each length.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question of the harness.")] = None,
    ruler_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,...", help="Context lengths of RULER and other tasks made for a length; 4096 if not given."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt of the harness, at most; longer ones lose their beginning. No limit if not given."
        ),
    ] = None,
) -> None:
    """Measure a trained text model: perplexity by context length, recall, retrieval of needles, lm-evaluation-harness.

    Without --text, the run.json of the training in MODEL's folder says which text is read, and the command names it.
    Texts are read in blocks: memory does not grow with the context length (only softmax attention keeps all of it).
    Results are saved as they come; those of an earlier evaluation are replaced.
    """
    less_memory = "a smaller --block or --batch-size, or --dtype bfloat16,"
    with one_line_errors(memory=less_memory), one_document(as_json) as give_document:
        import_mixers(imports)
        from ..analysis.language_plots import save_perplexity_plot
        from ..analysis.plot_style import is_plot
        from ..analysis.tables import evaluation_tables
        from ..distributed import context_parallel as divide
        from ..evaluation.evaluate import EvaluationSettings
        from ..evaluation.evaluate import evaluate as measurements
        from ..evaluation.processes import check_processes, context_group, is_first_process
        from ..evaluation.report import EvaluationReport, is_evaluation, plan_evaluation
        from ..evaluation.text import HeldOutText
        from ..models.loading import load_language_model, model_folder
        from ..outputs import claim_files, default_output

        settings = EvaluationSettings(
            measures=() if (lm_eval or suite) and not on else values("--on", on or ["perplexity"], str),
            lengths=values("--lengths", lengths, int),
            texts=texts,
            stretch=stretch,
            batch_size=batch_size,
            pairs=pairs,
            symbols=symbols,
            recall_examples=recall_examples,
            needle_examples=needle_examples,
            ruler_examples=ruler_examples,
            depths=values("--depths", depths, float),
            seed=seed,
            block=block,
        )
        tasks = values("--lm-eval", lm_eval, str) if lm_eval else ()
        suites = values("--suite", suite, str) if suite else ()
        harness = _harness(
            tasks,
            suites,
            include_path=include_path,
            limit=limit,
            num_fewshot=num_fewshot,
            ruler_lengths=None if ruler_lengths is None else values("--ruler-lengths", ruler_lengths, int),
            max_length=max_length,
        )
        check_processes(context_parallel)
        if context_parallel > 1 and (tasks or suites):
            raise ValueError(
                "--lm-eval and --suite need --context-parallel 1, because the harness reads through a cache, got "
                f"{context_parallel}; leave one of the two out"
            )
        model_folder(model)  # says what is wrong with it, before anything is said of a place in it
        output = default_output(model, "evaluation.json") if output is None else output
        if os.path.realpath(output) in set(map(os.path.realpath, text or ())):
            raise ValueError(
                f"output must be another file than the text that is read, got {output}; choose another name"
            )
        held_out = HeldOutText(text or (), model)
        files: dict[Path, Callable[[Path], bool]] = {output: is_evaluation}
        if "perplexity" in settings.measures:
            plot = output.parent / f"{output.stem}-perplexity.png"
            files[plot] = partial(is_plot, earlier=is_evaluation(output))
        speaks = is_first_process()
        if dry_run:
            with claim_files("output", files, "evaluation", overwrite=False):
                plan = plan_evaluation(model, settings, tasks, suites, text=held_out.name, output=output)
            if speaks:
                (give_document if as_json else show_plan)(plan)
            return
        claimed = claim_files("output", files, "evaluation", overwrite=overwrite) if speaks else nullcontext()
        with context_group(context_parallel, device) as (device, group), claimed:
            language_model, tokenizer = load_language_model(model, device=device, dtype=dtype)
            if group is not None:
                divide(language_model, group)
            reads_text = "perplexity" in settings.measures
            if reads_text and held_out.notice and speaks:
                held_out.find()
                show(held_out.notice, error=True)
            documents = held_out.documents(tokenizer) if reads_text else ()
            haystack = held_out.haystack()
            measured = measurements(language_model, tokenizer, settings, documents=documents, text=haystack)
            if not speaks:  # it reads its part of the texts
                _ = list(measured)
                return
            report = EvaluationReport(
                output, model=language_model, name=str(model), settings=settings, text=held_out.name
            )
            try:
                for measure, rows in harness(language_model, tokenizer, batch_size=batch_size, seed=seed, block=block):
                    report.add(measure, rows)
                with Console(stderr=True, quiet=quiet).status("Measuring") as status:
                    for measure, rows in measured:
                        report.add(measure, rows)
                        status.update(f"Measuring; done: {measure} at {rows[-1].length:,} tokens")
            finally:  # shows the measurements before an error too
                console = Console()
                for table in evaluation_tables(report.results):
                    console.print(table)
                if "perplexity" in report.results:
                    show(f"Text: {held_out.name}")
                if report.results:
                    show(f"Results: {output}")
            if "perplexity" in report.results:
                models = {model.resolve().name: report.results["perplexity"]}
                show_plots("Plot", partial(save_perplexity_plot, models, plot))
        if as_json:
            give_document(report.document())


def _harness(
    tasks: Sequence[str], suites: Sequence[str], **options: Any
) -> Callable[..., Iterator[tuple[str, list[Any]]]]:
    """What measures tasks and suites with lm-evaluation-harness and the options that are its own: names and rows of results."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if not tasks and not suites:
        if given:
            raise ValueError(
                f"{', '.join(given)} must go with --lm-eval or --suite, which are not given; add one or leave them out"
            )
        return lambda *_, **__: iter(())
    if not all(tasks):
        raise ValueError("--lm-eval must be names of tasks separated by commas, got an empty one")
    from ..evaluation.suites import check_suites, evaluate_suites

    check_suites(suites)
    try:
        from ..evaluation.harness import evaluate_with_harness
    except ImportError:
        raise ValueError("--lm-eval and --suite need lm-evaluation-harness; pip install 'fastweights[eval]'") from None

    def measure(model: Any, tokenizer: Any, **more: Any) -> Iterator[tuple[str, list[Any]]]:
        if tasks:
            yield "lm-eval", evaluate_with_harness(model, tokenizer, tasks, **options, **more)
        if suites:
            scores, compared = evaluate_suites(model, tokenizer, suites, **options, **more)
            yield "lm-eval", scores
            yield "suites", compared

    return measure
