"""Trains and measures the models of a run, from text or from their checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ...checks import describe_value
from ...data.text import PreparedText, TokenShards
from ...environment import machine, versions
from ...evaluation import continue_text, load_language_model, perplexity_by_length
from ...files import write_json
from ...kinds import checked
from ...results import LanguageResult
from ...results.language import load_result, save_result
from ...stopping import StopSignals
from ..calling_script import work_begins
from ..checkpoints import checkpoint_step, checkpoints_in, latest_whole
from ..folder import as_stored
from .agreement import check_same_models, check_same_run, check_shared
from .callbacks import NonFiniteLoss, RunLog, StopAt, StopOnSignal, TensorBoardLog, loss_curves
from .compiling import compiler_loading, what_to_compile
from .context import ContextGroups
from .folder import MEASURED, LanguageFolder
from .joining import joined
from .model import build_model, model_name, moments_of, training_facts
from .planning import check_training, checked_configs
from .processes import (
    from_main_process,
    is_main_process,
    on_every_process,
    on_main_process,
    step_size,
    world_size,
)
from .progress import TrainingProgress, line_printer
from .rows import DataStart, check_rows, find_start
from .run import LanguageRun
from .stages import reads_on
from .texts import prepare_texts
from .trainer import LanguageTrainer, held_out_rows

__all__ = ["NonFiniteLoss", "train_all", "train_language"]

CONTINUED_TOKENS = 100
PATIENCE = timedelta(minutes=30)  # of a GPU, for another process that compiles or writes a checkpoint


@checked
def train_language(
    run: LanguageRun,
    *,
    stop_at: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    signals: StopSignals | None = None,
) -> list[LanguageResult] | None:
    """Train every model of `run`, and measure it on held-out text.

    Killed at any moment and called again with the same run, it continues after the latest checkpoint with the same data, and
    on the same machine and number of threads with the same losses. A checkpoint that is not as it was written is set aside and
    reported; the one before is continued. In several processes (torchrun, srun, accelerate launch) every
    process calls it, and returns once the main process has. `output` must then be a folder that all of them see; `cache` may be
    another one on each host. Where one of them fails, dies or stands still, the others end within a minute, with exit code 1
    and a message that names it.

    Args:
        stop_at: end after this step with a checkpoint; a later call without it, or with a later step, continues from there. Where
            a later step is saved already, nothing is trained.
        overwrite: delete an earlier training in the output folder.
        console: shows progress; None for silence.
        signals: entered by the caller. SIGTERM, SIGHUP and SIGUSR1, to any process of the training, then let every process
            finish its step, save a checkpoint and raise `Stopped`. Without it no signal is handled.

    Returns:
        One result per model, in the main process; None if training has not ended (`stop_at`), or in another process.

    Raises:
        ValueError: text, tokenizer, model or output folder that cannot be used; or processes with other code, GPUs, settings or
            text than the others. Nothing has been trained. Or a run with graphs = True, of whose steps no CUDA graph can be
            made.
        NonFiniteLoss: the loss became infinite or NaN. The last checkpoint is of a step before.
        SaveError: a checkpoint could not be written. The one before is whole.
        WriteError: another file could not be written.
        Stopped: a signal arrived. The same call continues.
    """
    work_begins("train_language")
    if not isinstance(run, LanguageRun) or run.COMMAND != LanguageRun.COMMAND:
        raise TypeError(f"run must be a LanguageRun, got {describe_value(run)}; load_run reads one from a file")
    with joined():
        return train_all(
            run, stop_at, overwrite, console or Console(quiet=True), signals or StopSignals(), LanguageTrainer
        )


def train_all(
    run: LanguageRun,
    stop_at: int | None,
    overwrite: bool,
    console: Console,
    signals: StopSignals,
    trainer_class: type[LanguageTrainer],
) -> list[LanguageResult] | None:
    """As `train_language` says, among processes that have `joined`. trainer_class: trains each model and stage."""
    check_same_run(run, stop_at=stop_at, overwrite=overwrite)
    singles = on_every_process(lambda: check_training(run, stop_at=stop_at, overwrite=overwrite))
    check_same_models(singles)
    PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    check_shared(Path(run.output))
    texts = prepare_texts(run, singles, console)
    console = console if is_main_process() else Console(quiet=True)
    report = line_printer(console)
    configs, starts = on_every_process(lambda: _check_all(singles, texts, report))
    folder, has_parts = LanguageFolder(Path(run.output)), bool(run.mixers or run.presets or run.stages)
    with folder.opened(run, texts[0], overwrite=overwrite) if has_parts else nullcontext():
        results: dict[str, LanguageResult | None] = {}  # by the folder
        for single, config, text, start in zip(singles, configs, texts, starts, strict=True):
            before = single.model.get("path")  # a stage whose stage before has been stopped waits for it
            waits = from_main_process(before in results and results[before] is None)
            results[single.output] = (
                None
                if waits
                else _train_one(
                    single,
                    config,
                    text,
                    start,
                    stop_at,
                    overwrite,
                    trainer_class,
                    report=report,
                    console=console,
                    signals=signals,
                )
            )
        if not is_main_process():
            return None
        finished = [result for result in results.values() if result is not None]
        if len(finished) < len(results):
            open_folders = [LanguageFolder(Path(output)) for output, result in results.items() if result is None]
            saved = [checkpoint_step(one) for open in open_folders for one in checkpoints_in(open.checkpoints)[-1:]]
            without = "--overwrite and --stop-at" if overwrite else "--stop-at"
            report(f"stopped after step {min(saved):,}; the same command without {without} continues from there")
            return None
        if has_parts:
            write_json(folder.results, [dataclasses.asdict(result) for result in finished])
        return finished


def _check_all(
    singles: Sequence[LanguageRun], texts: Sequence[PreparedText], report: Callable[[str], None]
) -> tuple[list[Any], list[DataStart | None]]:
    """The configurations of all models and stages, once text and tokenizer are known, and where they begin to read."""
    starts = [_check_text(single, text, report) for single, text in zip(singles, texts, strict=True)]
    return checked_configs(singles, texts[0].tokenizer), starts


def _check_text(run: LanguageRun, text: PreparedText, report: Callable[[str], None]) -> DataStart | None:
    """Where a training begins to read, or ValueError where it cannot or has too little text. None where a stage before reads the
    same stream: this is known when that has ended."""
    start = None if reads_on(run) else find_start(run, text)
    if start is not None:
        check_rows(run, text, start, count=_count_rows(run))
    if held_out_rows(text.held_out, run.length).length < run.length:
        report(
            f"held-out text of {len(text.held_out):,} tokens is shorter than a row: the held-out loss is that of all of it"
        )
    return start


def _count_rows(run: LanguageRun) -> int:
    """How many rows all processes read."""
    plan = run.plan(world_size())
    return plan.rows(plan.steps)


def _train_one(
    run: LanguageRun,
    config: Any,
    text: PreparedText,
    start: DataStart | None,
    stop_at: int | None,
    overwrite: bool,
    trainer_class: type[LanguageTrainer],
    *,
    report: Callable[[str], None],
    console: Console,
    signals: StopSignals,
) -> LanguageResult | None:
    context = ContextGroups.of(run)
    context.make()  # in every process: later those of the first group alone measure the model
    start = find_start(run, text) if start is None else start
    fingerprints = {**text.fingerprints, **start.record(run), **run.fingerprints()}
    text = dataclasses.replace(text, fingerprints=fingerprints)
    folder, name = LanguageFolder(Path(run.output)), model_name(run, config)
    title = " ".join(filter(None, (name, run.stage)))
    model = None
    if not from_main_process(folder.result.exists() and not overwrite):  # a training that has finished needs none
        with compiler_loading(what_to_compile(run), PartialState().device):
            model = build_model(run, config)
    with folder.opened(run, text, overwrite=overwrite):
        if model is None or from_main_process(folder.result.exists()):
            return _load_finished(run, folder, text, report) if context.index == 0 else None
        latest = on_main_process(lambda: latest_whole(folder.checkpoints, config, report))
        if stop_at is not None and latest is not None and stop_at <= checkpoint_step(latest) < run.max_steps:
            report(
                f"{title}: step {checkpoint_step(latest):,} is saved already, so that nothing is trained up to step {stop_at:,}"
            )
            return None
        report(f"{title}: {step_size(run)}{', parameters sharded by FSDP2' if run.fsdp else ''}")
        began, plan = time.perf_counter(), run.plan(world_size())
        progress = TrainingProgress(console, title=title, plan=plan, log_every=run.log_every)
        log = RunLog(folder.log, plan)
        board = [TensorBoardLog(folder.tensorboard)] if run.writes_tensorboard else []
        callbacks = [StopOnSignal(signals, report), StopAt(stop_at), log, *board, progress]
        parameters = model.num_parameters(only_trainable=True)
        earlier = moments_of(run) if latest is None else None
        trainer = trainer_class(run, model, text, folder, callbacks, earlier, start)
        with progress:
            with signals.hold(), trainer.checkpoints:
                trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
            if trainer.state.global_step < run.max_steps:
                return None
            if not from_main_process(run.max_steps in loss_curves(folder.log)["held_out_steps"]):
                trainer.evaluate()
        tokens = plan.tokens(run.max_steps)
        trainer.save_to(folder.model, training_facts(run, loss_curves(folder.log), tokens=tokens))
        measured = _measure(run, folder.model, text.held_out, trainer.args.device) if context.index == 0 else {}
        if not is_main_process():
            return None
        result = LanguageResult(
            name=name,
            folder=str(folder.model),
            run=as_stored(dataclasses.asdict(run)),
            parameters=parameters,
            state_size=model.state_size(run.length),
            steps=run.max_steps,
            tokens=tokens,
            **loss_curves(folder.log),
            **measured,
            seconds=time.perf_counter() - began,
            versions=versions(),
            machine=machine(str(trainer.args.device)),
        )
        save_result(folder.result, result)
        return result


def _load_finished(
    run: LanguageRun, folder: LanguageFolder, text: PreparedText, report: Callable[[str], None]
) -> LanguageResult:
    """The result of a finished training. Where the run now measures other things, the saved model is measured again, by all
    processes of the first context group."""
    result = load_result(folder.result)
    result = dataclasses.replace(result, name=run.label or result.name)
    wanted = {name: as_stored(getattr(run, name)) for name in MEASURED}
    same = wanted.items() <= result.run.items()
    report(f"{result.label}: finished earlier, not trained again" + ("" if same else "; measured as this run asks"))
    if not same:
        measured = _measure(run, folder.model, text.held_out, PartialState().device)
        result = dataclasses.replace(result, run={**result.run, **wanted}, **measured)
        if is_main_process():
            save_result(folder.result, result)
    return result


def _measure(run: LanguageRun, model_folder: Path, held_out: TokenShards, device: torch.device) -> dict[str, Any]:
    """The fields `perplexities` and `continuation` of a result, of the model as it was saved. Context lengths that the held-out
    text is too short for are left out. With context_parallel the processes of a context group read the texts together."""
    trusted = run.tokenizer.trust_remote_code
    model, tokenizer = load_language_model(model_folder, device=str(device), trust_remote_code=trusted)
    written = None
    if run.prompt and is_main_process():
        written = continue_text(model, tokenizer, run.prompt, max_new_tokens=CONTINUED_TOKENS, seed=run.seed)
    ContextGroups.of(run).divide(model)
    lengths = [length for length in run.context_lengths if length <= len(held_out)]
    entries = []
    if lengths:
        documents = (held_out.document(number) for number in range(len(held_out.starts)))
        entries = perplexity_by_length(model, documents, lengths, texts=run.context_texts)
    return {"perplexities": [dataclasses.asdict(entry) for entry in entries], "continuation": written}
