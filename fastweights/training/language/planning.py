"""What a training will do, and whether it can, before it begins: its checks, and its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...checks import check_flag, check_size
from ...data.text import TextTokenizer
from ...layers.choice import check_backend
from ..checkpoints import checkpoint_step, checkpoints_in
from ..folder import as_stored
from ..optimization import weight_decay_groups
from .communication import describe_exchanges, exchanges
from .estimate import Machine, choose_sharding, describe_memory, describe_time, parse_machine
from .folder import LanguageFolder
from .model import model_config, model_name, model_to_plan, model_tokenizer, moments_of
from .processes import check_launch, is_main_process, step_size, world_size
from .run import LanguageRun
from .stages import resolve

__all__ = ["check_training", "checked_configs", "plan_training"]


def check_training(
    run: LanguageRun, *, stop_at: int | None, overwrite: bool, machine: Machine | None = None
) -> list[LanguageRun]:
    """The runs of single models and stages, after all checks that need no text. Nothing is written. machine: where they will
    train, one process per GPU; None for the processes and GPUs that there are.

    Raises:
        ValueError: a launch, device, package, model or output folder with which `run` cannot be trained.
    """
    check_flag("overwrite", overwrite)
    if stop_at is not None:
        check_size("stop_at", stop_at)
    check_launch()
    processes = world_size() if machine is None else machine.count
    singles = resolve(run, processes)
    for single in singles:
        _check_device(single, processes, machine is not None or torch.cuda.is_available())
    for tracker in run.trackers:
        if find_spec(tracker) is None:
            raise ValueError(
                f"report_to {tracker!r} needs the package {tracker}; pip install {tracker}, or leave report_to out"
            )
    checked = _checked_models(singles)
    memory = machine.gpu.memory if machine is not None else _own_memory()
    singles = [
        dataclasses.replace(single, fsdp=choose_sharding(single, model, processes, memory))
        for single, (_, model) in zip(singles, checked, strict=True)
    ]
    parts = dict.fromkeys((run.output, *(single.output for single in singles)))
    if not is_main_process():  # which locks the folders: several at a time would be in each other's way
        return singles
    for part in parts:
        work = next((single for single in singles if single.output == part), run)
        LanguageFolder(Path(part), processes).check(work, overwrite=overwrite)
    return singles


def _own_memory() -> float | None:
    """Bytes of the GPU of this process, None without one."""
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if torch.cuda.is_available()
        else None
    )


def plan_training(
    run: LanguageRun, *, stop_at: int | None = None, overwrite: bool = False, gpu: str | None = None
) -> dict[str, Any]:
    """The settings of a run, and for each of its models and stages the number of parameters, its steps, tokens and learning rate,
    where its training begins and where it goes. Nothing is written. Of the text of local files the first document is read.

    A tokenizer that is still to be trained is taken to have as many tokens as it may. One of the hub is not fetched where the
    model has a vocab_size or a preset, whose number of tokens is taken.

    Args:
        gpu: a name of `estimate.GPUS`, or several of them as in "8xh100", one process each: the plan is for these, and estimates
            the time. Without it, the plan is for the processes that there are.

    Raises:
        ValueError: as `train_language`, but for text and tokenizer; or a training that does not fit into the GPU's memory.
    """
    machine = None if gpu is None else parse_machine(gpu)
    processes = world_size() if machine is None else machine.count
    singles = check_training(run, stop_at=stop_at, overwrite=overwrite, machine=machine)
    settings = model_tokenizer(singles[0])
    for number, single in enumerate(singles):
        text = single.corpus.from_start()
        if text.is_local and all(text != other.corpus.from_start() for other in singles[:number]):
            next(single.corpus.documents(), None)  # raises where there is none
    configs: dict[str, Any] = {}
    models = []
    for single in singles:
        before = configs.get(str(single.model.get("path")))
        config = configs[single.output] = _planned_config(single, settings, before)
        models.append(_plan_model(single, config, overwrite, processes, machine))
    return {
        "settings": as_stored(dataclasses.asdict(run)),
        **({} if run.stages else {"step": step_size(run, processes)}),
        "models": models,
    }


def _planned_config(run: LanguageRun, tokenizer: TextTokenizer, before: Any) -> Any:
    sized = not run.model.keys().isdisjoint(("vocab_size", "preset", "path"))
    if tokenizer.exists and not (sized and tokenizer.name is not None):
        return model_config(run, tokenizer.load(), before)
    if not tokenizer.exists and "path" not in run.model:
        run = dataclasses.replace(run, model={"vocab_size": tokenizer.vocab_size, **run.model})
    return model_config(run, before=before)


def _plan_model(
    run: LanguageRun, config: Any, overwrite: bool, processes: int, machine: Machine | None
) -> dict[str, Any]:
    model = model_to_plan(run, config)
    trained = model.num_parameters(only_trainable=True)
    plan = run.plan(processes)
    exchanged = list(describe_exchanges(exchanges(run, model))) if run.context_parallel > 1 else []
    return {
        "name": model_name(run, config),
        **({"stage": run.stage, "step": step_size(run, processes)} if run.stage else {}),
        "parameters": model.num_parameters(),
        **({"trained parameters": trained} if trained < model.num_parameters() else {}),
        "state size": model.state_size(run.length),
        "steps": plan.steps,
        "tokens": plan.tokens(plan.steps),
        "learning rate": run.describe_rate(plan),
        **({"sharding": f"parameters, gradients and optimizer over {processes} processes (FSDP2)"} if run.fsdp else {}),
        **({"context parallelism": "; ".join(exchanged)} if exchanged else {}),
        "memory": describe_memory(run, model, processes, machine),
        **({} if machine is None else {"time": describe_time(run, model, plan, machine)}),
        "begins": _describe_begin(run, overwrite),
        "output": run.output,
    }


def _describe_begin(run: LanguageRun, overwrite: bool) -> str:
    folder = LanguageFolder(Path(run.output))
    saved = checkpoints_in(folder.checkpoints)
    if overwrite or not (folder.result.exists() or saved):
        return "from the start"
    return "has ended" if folder.result.exists() else f"after step {checkpoint_step(saved[-1]):,}"


def _check_device(run: LanguageRun, processes: int, has_gpu: bool) -> None:
    """Refuses a run that the hardware cannot carry out: accelerate would fail later, or silently leave out the sharding."""
    if run.precision == "fp16" and not has_gpu:
        raise ValueError('precision "fp16" needs a GPU, and there is none; choose "bf16" or "no"')
    if run.graphs and not has_gpu:
        raise ValueError("graphs need a GPU, and there is none; set graphs = false")
    if run.fsdp and (processes == 1 or not has_gpu):
        raise ValueError(
            f"fsdp needs several processes with a GPU each, got {processes} with {torch.cuda.device_count()} GPUs; start them "
            "with torchrun --nproc-per-node, or set fsdp = false"
        )


def _checked_model(run: LanguageRun, tokenizer: Any, before: Any) -> tuple[Any, Any]:
    """The configuration of the run's model, and the model without memory for its weights, whose building checks it. before: the
    configuration of the model which it continues, where a stage before makes it."""
    config = model_config(run, tokenizer, before)
    for name, options in config.mixers():
        check_backend(name, options, "cuda" if torch.cuda.is_available() else "cpu")
    model = model_to_plan(run, config)
    weight_decay_groups(model, run.weight_decay, run.groups)
    if run.context_parallel > 1:
        exchanges(run, model)  # raises where the layers cannot be divided
    return config, model


def _checked_models(singles: Sequence[LanguageRun], tokenizer: Any = None) -> list[tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for single in singles:
        before, _ = found.get(str(single.model.get("path")), (None, None))
        found[single.output] = _checked_model(single, tokenizer, before)
        if before is None:
            moments_of(single)
    return list(found.values())


def checked_configs(singles: Sequence[LanguageRun], tokenizer: Any = None) -> list[Any]:
    """The configurations of all models and stages, checked. tokenizer: where there is one already."""
    return [config for config, _ in _checked_models(singles, tokenizer)]
