"""Trains and measures the models of a run, from text or from their checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ...checks import check_flag, check_size, describe_value
from ...data.text import PreparedText, TextCorpus, TextTokenizer, TokenShards, prepare_text
from ...environment import machine, versions
from ...evaluation import continue_text, load_language_model, perplexity_by_length
from ...files import write_json
from ...kinds import checked
from ...layers.choice import check_backend
from ...models import FastWeightsConfig, FastWeightsForCausalLM
from ...results import LanguageResult
from ...results.language import load_result, save_result
from ...stopping import StopSignals
from ..calling_script import work_begins
from ..checkpoints import checkpoint_step, checkpoints_in, latest_whole
from ..folder import as_stored
from .callbacks import NonFiniteLoss, RunLog, StopAt, StopOnSignal, TensorBoardLog, loss_curves
from .compiling import compiler_loading, what_to_compile
from .folder import MEASURED, LanguageFolder
from .model import build_model, model_config, model_name, model_tokenizer, training_facts
from .processes import check_launch, from_main_process, is_main_process, on_main_process, step_size, world_size
from .progress import TextProgress, TrainingProgress
from .rows import check_rows, find_start
from .run import LanguageRun
from .trainer import LanguageTrainer, held_out_rows

__all__ = ["NonFiniteLoss", "check_training", "checked_config", "plan_training", "train_language"]

CONTINUED_TOKENS = 100
PATIENCE = timedelta(hours=1)  # for the main process, which measures a model while the others wait to train the next


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
    reported; the one before is continued. In several processes (torchrun, accelerate launch) every
    process calls it; `output` and `cache` must then be folders that all of them see.

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
        ValueError: text, tokenizer, model or output folder that cannot be used. Nothing has been trained. Or a run with
            graphs = True, of whose steps no CUDA graph can be made.
        NonFiniteLoss: the loss became infinite or NaN. The last checkpoint is of a step before.
        SaveError: a checkpoint could not be written. The one before is whole.
        WriteError: another file could not be written.
        Stopped: a signal arrived. The same call continues.
    """
    work_begins("train_language")
    if not isinstance(run, LanguageRun):
        raise TypeError(f"run must be a LanguageRun, got {describe_value(run)}; load_run reads one from a file")
    singles = check_training(run, stop_at=stop_at, overwrite=overwrite)
    PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    signals = signals or StopSignals()  # not entered, it handles nothing
    console = console if console is not None and is_main_process() else Console(quiet=True)

    def report(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    corpus = dataclasses.replace(run.corpus, excluded=(*run.corpus.excluded, run.output, run.cache))
    with TextProgress(console) as progress:
        text = _prepare_text(corpus, model_tokenizer(singles[0]), run.cache, report, progress)
    start = find_start(run, text)
    check_rows(run, text, start, count=run.max_steps * run.batch_size * run.accumulation * world_size())
    text = dataclasses.replace(text, fingerprints={**text.fingerprints, **start.record(run)})
    if held_out_rows(text.held_out, run.length).length < run.length:
        report(
            f"held-out text of {len(text.held_out):,} tokens is shorter than a row: the held-out loss is that of all of it"
        )
    configs = [checked_config(single, text.tokenizer) for single in singles]
    folder = LanguageFolder(Path(run.output))
    with folder.opened(run, text, overwrite=overwrite) if run.mixers else nullcontext():
        results = [
            _train_one(single, config, text, stop_at, overwrite, report=report, console=console, signals=signals)
            for single, config in zip(singles, configs, strict=True)
        ]
        if not is_main_process():
            return None
        finished = [result for result in results if result is not None]
        if len(finished) < len(results):
            saved = [_saved_step(single) for single, result in zip(singles, results, strict=True) if result is None]
            without = "--overwrite and --stop-at" if overwrite else "--stop-at"
            report(f"stopped after step {min(saved):,}; the same command without {without} continues from there")
            return None
        if run.mixers:
            write_json(folder.results, [dataclasses.asdict(result) for result in finished])
        return finished


def check_training(run: LanguageRun, *, stop_at: int | None, overwrite: bool) -> list[LanguageRun]:
    """The runs of single models, after all checks that need no text. Nothing is written.

    Raises:
        ValueError: a launch, device, package, model or output folder with which `run` cannot be trained.
    """
    check_flag("overwrite", overwrite)
    if stop_at is not None:
        check_size("stop_at", stop_at)
    check_launch()
    _check_device(run)
    for tracker in run.trackers:
        if find_spec(tracker) is None:
            raise ValueError(
                f"report_to {tracker!r} needs the package {tracker}; pip install {tracker}, or leave report_to out"
            )
    singles = run.models()
    for single in singles:
        checked_config(single)
    for part in (run, *singles):
        LanguageFolder(Path(part.output)).check(part, overwrite=overwrite)
    return singles


def plan_training(run: LanguageRun, *, stop_at: int | None = None, overwrite: bool = False) -> dict[str, Any]:
    """The settings of a run, and for each of its models the number of parameters, where its training begins and where it goes.
    Nothing is written. Of the text of local files the first document is read.

    A tokenizer that is still to be trained is taken to have as many tokens as it may.

    Raises:
        ValueError: as `train_language`, but for text and tokenizer.
    """
    singles = check_training(run, stop_at=stop_at, overwrite=overwrite)
    settings = model_tokenizer(singles[0])
    if run.corpus.is_local:
        next(run.corpus.documents(), None)  # raises where there is none
    return {
        "settings": as_stored(dataclasses.asdict(run)),
        "step": step_size(run),
        "models": [_plan_model(single, settings, overwrite) for single in singles],
    }


def _plan_model(run: LanguageRun, tokenizer: TextTokenizer, overwrite: bool) -> dict[str, Any]:
    if tokenizer.exists:
        config = model_config(run, tokenizer.load())
    elif "path" in run.model:
        config = model_config(run)
    else:
        config = model_config(dataclasses.replace(run, model={"vocab_size": tokenizer.vocab_size, **run.model}))
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    return {
        "name": model_name(run, config),
        "parameters": model.num_parameters(),
        "state size": model.state_size(run.length),
        "steps": run.max_steps,
        "tokens": run.max_steps * run.length * run.batch_size * run.accumulation * world_size(),
        "begins": _describe_begin(run, overwrite),
        "output": run.output,
    }


def _describe_begin(run: LanguageRun, overwrite: bool) -> str:
    folder = LanguageFolder(Path(run.output))
    saved = checkpoints_in(folder.checkpoints)
    if overwrite or not (folder.result.exists() or saved):
        return "from the start"
    return "has ended" if folder.result.exists() else f"after step {checkpoint_step(saved[-1]):,}"


def _prepare_text(
    corpus: TextCorpus, tokenizer: TextTokenizer, cache: str, report: Callable[[str], None], progress: TextProgress
) -> PreparedText:
    """Tokenizer and tokens, whose checksums the main process alone compares."""
    text = prepare_text(corpus, tokenizer, cache, report, read_all=is_main_process(), progress=progress)
    if world_size() > 1:
        from_main_process(None)  # which may have made damaged tokens again, after another process opened them
        if not is_main_process():
            text = prepare_text(corpus, tokenizer, cache, report, read_all=False)
    return text


def _check_device(run: LanguageRun) -> None:
    """Refuses a run that the hardware cannot carry out: accelerate would fail later, or silently leave out the sharding."""
    if run.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError('precision "fp16" needs a GPU, and there is none; choose "bf16" or "no"')
    if run.graphs and (world_size() > 1 or not torch.cuda.is_available()):
        raise ValueError(
            f"graphs need one process with a GPU, got {world_size()} with {torch.cuda.device_count()} GPUs; set graphs = false"
        )
    if run.fsdp and (world_size() == 1 or not torch.cuda.is_available()):
        raise ValueError(
            f"fsdp needs several processes with a GPU each, got {world_size()} with {torch.cuda.device_count()} GPUs; start them "
            "with torchrun --nproc-per-node, or set fsdp = false"
        )


def checked_config(run: LanguageRun, tokenizer: Any = None) -> FastWeightsConfig:
    """The configuration of the run's model, checked by building the model without memory for its weights."""
    config = model_config(run, tokenizer)
    for name, options in config.mixers():
        check_backend(name, options, "cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        FastWeightsForCausalLM(config)
    return config


def _train_one(
    run: LanguageRun,
    config: FastWeightsConfig,
    text: PreparedText,
    stop_at: int | None,
    overwrite: bool,
    *,
    report: Callable[[str], None],
    console: Console,
    signals: StopSignals,
) -> LanguageResult | None:
    folder, name = LanguageFolder(Path(run.output)), model_name(run, config)
    model = None
    if not from_main_process(folder.result.exists() and not overwrite):  # a training that has finished needs none
        with compiler_loading(what_to_compile(run), PartialState().device):
            model = build_model(run, config)
    with folder.opened(run, text, overwrite=overwrite):
        if model is None or from_main_process(folder.result.exists()):
            return _load_finished(run, folder, text, report) if is_main_process() else None
        latest = on_main_process(lambda: latest_whole(folder.checkpoints, config, report))
        if stop_at is not None and latest is not None and stop_at <= checkpoint_step(latest) < run.max_steps:
            report(
                f"{name}: step {checkpoint_step(latest):,} is saved already, so that nothing is trained up to step {stop_at:,}"
            )
            return None
        report(f"{name}: {step_size(run)}")
        began = time.perf_counter()
        tokens_a_step = run.length * run.batch_size * run.accumulation * world_size()
        progress = TrainingProgress(
            console,
            title=name,
            tokens_a_step=tokens_a_step,
            steps=run.max_steps,
            log_every=run.log_every,
        )
        log = RunLog(folder.log, tokens_a_step=tokens_a_step)
        board = [TensorBoardLog(folder.tensorboard)] if run.writes_tensorboard else []
        callbacks = [StopOnSignal(signals, report), StopAt(stop_at), log, *board, progress]
        parameters = model.num_parameters(only_trainable=True)
        trainer = LanguageTrainer(run, model, text, folder, callbacks)
        with progress:
            with signals.hold():
                trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
            if trainer.state.global_step < run.max_steps:
                return None
            if not from_main_process(run.max_steps in loss_curves(folder.log)["held_out_steps"]):
                trainer.evaluate()
        trainer.save_to(
            folder.model, training_facts(run, loss_curves(folder.log), tokens=run.max_steps * tokens_a_step)
        )
        if not is_main_process():
            return None
        result = LanguageResult(
            name=name,
            folder=str(folder.model),
            run=as_stored(dataclasses.asdict(run)),
            parameters=parameters,
            state_size=model.state_size(run.length),
            steps=run.max_steps,
            tokens=run.max_steps * tokens_a_step,
            **loss_curves(folder.log),
            **_measure(run, folder.model, text.held_out, trainer.args.device),
            seconds=time.perf_counter() - began,
            versions=versions(),
            machine=machine(str(trainer.args.device)),
        )
        save_result(folder.result, result)
        return result


def _saved_step(run: LanguageRun) -> int:
    """The step of the latest checkpoint."""
    return checkpoint_step(checkpoints_in(LanguageFolder(Path(run.output)).checkpoints)[-1])


def _load_finished(
    run: LanguageRun, folder: LanguageFolder, text: PreparedText, report: Callable[[str], None]
) -> LanguageResult:
    """The result of a finished training. Where the run now measures other things, the saved model is measured again."""
    result = load_result(folder.result)
    result = dataclasses.replace(result, name=run.label or result.name)
    wanted = {name: as_stored(getattr(run, name)) for name in MEASURED}
    same = wanted.items() <= result.run.items()
    report(f"{result.name}: finished earlier, not trained again" + ("" if same else "; measured as this run asks"))
    if not same:
        measured = _measure(run, folder.model, text.held_out, PartialState().device)
        result = dataclasses.replace(result, run={**result.run, **wanted}, **measured)
        save_result(folder.result, result)
    return result


def _measure(run: LanguageRun, model_folder: Path, held_out: TokenShards, device: torch.device) -> dict[str, Any]:
    """The fields `perplexities` and `continuation` of a result, of the model as it was saved. Context lengths that the held-out
    text is too short for are left out."""
    trusted = run.tokenizer.trust_remote_code
    model, tokenizer = load_language_model(model_folder, device=str(device), trust_remote_code=trusted)
    lengths = [length for length in run.context_lengths if length <= len(held_out)]
    entries = []
    if lengths:
        documents = (held_out.document(number) for number in range(len(held_out.starts)))
        entries = perplexity_by_length(model, documents, lengths, texts=run.context_texts)
    written = None
    if run.prompt:
        written = continue_text(model, tokenizer, run.prompt, max_new_tokens=CONTINUED_TOKENS, seed=run.seed)
    return {"perplexities": [dataclasses.asdict(entry) for entry in entries], "continuation": written}
