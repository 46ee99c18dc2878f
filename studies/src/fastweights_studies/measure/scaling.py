"""Tokens per second of a training on one GPU and on several, by DDP and by FSDP2.

    python -m fastweights_studies.measure.scaling                    the 1B model of gdn on 1 and 2 GPUs
    python -m fastweights_studies.measure.scaling --gpus 1,4 --presets gdn-340m --mixers gdn,pgdn --ways DDP,FSDP2
    python -m fastweights_studies.measure.scaling --gpus 1,4 --presets gdn-340m --timeline step.png

Each training runs in processes of its own, which torchrun starts. They use the trainer of `fastweights train`, in bfloat16, with
blocks compiled and steps replayed as CUDA graphs, on documents of random tokens packed into rows; checkpoints are left out. The
processes of all trainings import at the same time. Those of one GPU then train side by side, on as many GPUs as there are, and
those of several one after another. The first steps, which compile, in which DDP waits for the GPU and after which graphs are
captured, do not count. Writes studies/results/scaling-<device>.json after each training. Earlier rows stay in the file where a
training is not run again, fails or exceeds the limit, which ends all its processes. --timeline draws one step of each training,
and measures what it consists of.

Ways to train on several GPUs:
    DDP                   parameters are copied to every GPU
    DDP-bf16              ... and gradients are added up in bfloat16
    DDP-launched          ... and the host launches every kernel
    FSDP2                 parameters are sharded, and gathered in the forward and again in the backward
    FSDP2-launched        ... and the host launches every kernel
    FSDP2-kept            gathered in the forward and kept for the backward
    FSDP2-prefetch        ... each block starts to gather the parameters of the next before it computes
    FSDP2-kept-prefetch   both
    context-heads         each row is divided over all GPUs, with `length` tokens for each; they exchange heads for tokens
    context-state         ... and states are passed on, where the rule allows it
    context-checkpointed  ... in the way that fits, with gradient checkpointing and parameters sharded by FSDP2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import TrainerCallback

from fastweights.data.text import PreparedText, TokenShards
from fastweights.data.text.shards import ShardWriter, token_dtype, write_manifest
from fastweights.models import preset
from fastweights.private_torch import import_compiler
from fastweights.training.language import LanguageRun
from fastweights.training.language.estimate import memory_parts
from fastweights.training.language.folder import LanguageFolder
from fastweights.training.language.model import build_model, model_config
from fastweights.training.language.processes import is_main_process, world_size
from fastweights.training.language.trainer import LanguageTrainer
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import Value, find_rows, make_rows, name_file, replace_rows
from fastweights_studies.measure.step_timeline import ENDS, StepProfile, draw, summarize
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row, select

TASK = "scaling"
WAYS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP-bf16": {"reduce_dtype": "bfloat16"},
    "DDP-launched": {"graphs": False},
    "FSDP2": {"fsdp": True},
    "FSDP2-launched": {"fsdp": True, "graphs": False},
    "FSDP2-kept": {"fsdp": True, "reshard_after_forward": False},
    "FSDP2-prefetch": {"fsdp": True, "forward_prefetch": 1},
    "FSDP2-kept-prefetch": {"fsdp": True, "reshard_after_forward": False, "forward_prefetch": 1},
    "context-heads": {"context_way": "heads"},
    "context-state": {"context_way": "state"},
    "context-checkpointed": {"context_way": "auto", "fsdp": True, "gradient_checkpointing": True},
}
WARM = 14  # steps: two after the last one that captures a graph
FOUND = "found.json"  # in the folder of a training: what was measured
GRACE = 10.0  # seconds for a launcher to end its processes

Wait = Callable[[float], dict[str, Any]]
Start = Callable[[], Wait]


class StepTimes(TrainerCallback):
    """When the first step began and ended, and the seconds of the steps from `warm` to `last`. Nothing is saved at the end."""

    def __init__(self, warm: int, last: int) -> None:
        self.warm_steps, self.last = warm, last
        self.began = time.perf_counter()
        self.first = self.warm = self.ended = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, self.warm_steps, self.last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if state.global_step == 1:
                self.first = now - self.began
            if state.global_step == self.warm_steps:
                self.warm = now
            if state.global_step == self.last:
                self.ended = now
        control.should_save = False


def write_text(folder: Path, vocabulary: int, tokens: int, longest: int = 4096) -> None:
    """Documents of random tokens and lengths up to `longest`, the same ones to train on and held out."""
    draws, splits = np.random.default_rng(0), {}
    dtype = token_dtype(vocabulary)
    for split in ("train", "held_out"):
        writer, left = ShardWriter(folder, split, dtype), tokens
        while left > 0:
            length = min(left, int(draws.integers(1, longest)))
            writer.append(draws.integers(vocabulary, size=length).tolist())
            left -= length
        splits[split] = writer.finished()
    write_manifest(folder, dtype=dtype, splits=splits, text="random")


def train(
    run: LanguageRun,
    text: Path,
    warm: int = WARM,
    timeline: bool = False,
    trainer: type[LanguageTrainer] = LanguageTrainer,
) -> dict[str, Any] | None:
    """One process of a training; what was measured in the main process.

    Args:
        warm: steps that do not count.
        timeline: profile a step too, the last but one.
        trainer: of this kind of run.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with torch.device(
        "cuda" if on_gpu and "path" not in run.model else "cpu"
    ):  # first weights are drawn in no time there
        model = build_model(run, model_config(run))
    parameters = sum(p.numel() for p in model.parameters())
    predicted = sum(memory_parts(run, model, world_size()).values())
    prepared = PreparedText(None, TokenShards(text, "train"), TokenShards(text, "held_out"), {})
    times, profile = StepTimes(warm, run.max_steps - (ENDS if timeline else 0)), StepProfile()
    callbacks: list[TrainerCallback] = [times, profile] if timeline else [times]
    trainer(run, model, prepared, LanguageFolder(Path(run.output)), callbacks).train()
    if not is_main_process():
        return None
    steps, tokens = times.last - warm, world_size() * run.batch_size * run.length // run.context_parallel
    seconds = times.ended - times.warm
    return {
        "parameters": parameters,
        "tokens_per_step": tokens,
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_second": steps * tokens / seconds,
        "first_step_s": times.first,
        "memory_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,  # with the memory of graphs
        "predicted_memory_bytes": predicted,
        "lanes": profile.lanes,
    }


@contextmanager
def launched(processes: int, fields: Mapping[str, Any], text: Path, gpu: int | None = None) -> Iterator[Start]:
    """Start the processes of a training, with one GPU each. The function that comes back has them train, and returns another one,
    which waits for as many seconds as it is given and returns the row.

    That one raises a SubprocessError where the training fails or exceeds the limit. All its processes have then ended.

    Args:
        gpu: the only one that the processes see, of those that this one sees; all where not given.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run.json")
        run.write_text(json.dumps({**fields, "output": folder}))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
        command = [sys.executable, *launcher, "--worker", str(run), str(text)]
        # One thread of torch per process, as torchrun itself advises.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if gpu is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:

            def wait(limit: float) -> dict[str, Any]:
                try:
                    process.wait(limit)
                finally:
                    end(process)
                if process.returncode:
                    raise subprocess.CalledProcessError(process.returncode, command)
                return json.loads(Path(folder, FOUND).read_text())

            def start() -> Wait:
                with suppress(BrokenPipeError), process.stdin as pipe:  # type: ignore[union-attr]
                    pipe.write(b"." * processes)
                return wait

            try:
                yield start
            finally:
                end(process)


def end(launcher: subprocess.Popen[Any]) -> None:
    """End a launcher and all processes that it has started, also those that do not listen."""
    try:
        started = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    launcher.terminate()
    try:
        launcher.wait(GRACE)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def work(path: Path, text: Path) -> None:
    """What a process that `launched` started does."""
    import_compiler()
    if not os.read(sys.stdin.fileno(), 1):  # waits for a byte: each process takes one
        raise SystemExit("the benchmark ended before this training began")
    fields = json.loads(path.read_text())
    measured = {name: fields.pop(name) for name in ("warm", "timeline") if name in fields}
    run = LanguageRun(**fields)
    row = train(run, text, **measured)
    if row is not None:
        Path(run.output, FOUND).write_text(json.dumps(row))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trainings(gpus: Sequence[int], ways: Sequence[str]) -> list[tuple[int, str | None]]:
    """GPUs of every training, and the way of several."""
    return [one for count in gpus for one in ([(1, None)] if count == 1 else [(count, way) for way in ways])]


def turns(gpus: Sequence[int], there: int) -> list[list[int]]:
    """Which trainings go side by side, by their places: those of one GPU on the GPUs that are there, then each of the others."""
    alone = [place for place, count in enumerate(gpus) if count == 1]
    several = [[place] for place, count in enumerate(gpus) if count > 1]
    return [alone[i : i + there] for i in range(0, len(alone), there)] + several


def begin(
    turn: Sequence[int], starts: Mapping[int, Start], limit: float
) -> list[tuple[int, Callable[[], dict[str, Any]]]]:
    """Start the trainings of a turn, which have as many seconds together. Each one's place, and what waits for its row."""
    waits = [starts[place]() for place in turn]
    ends = time.monotonic() + limit

    def rest(wait: Wait) -> dict[str, Any]:
        return wait(max(0.0, ends - time.monotonic()))

    return [(place, partial(rest, wait)) for place, wait in zip(turn, waits, strict=True)]


def model_options(mixer: str | None) -> dict[str, Any]:
    """What a model has in place of its preset's own options."""
    return {} if mixer is None else {"mixer": mixer}


def settings(gpus: int, way: str | None, length: int) -> dict[str, Any]:
    """The fields of a run that trains this way."""
    divided = {"context_parallel": gpus, "length": gpus * length} if way and "context_way" in WAYS[way] else {}
    return {**divided, **(WAYS[way] if way else {})}


def make_training_rows(
    preset: str,
    mixer: str | None,
    gpus: int,
    way: str | None,
    batch: int,
    length: int,
    values: Mapping[str, Value],
    origin: Origin,
) -> list[Row]:
    """The rows of a training with `batch` rows of `length` tokens per GPU and step, of divided rows the part of one GPU. mixer:
    in place of the preset's own."""
    column: dict[str, Plain] = {"preset": preset, "gpus": gpus, "way": way, "batch": batch, "length": length}
    return make_rows(TASK, origin, values, mixer=mixer, column=column, options=WAYS[way] if way else {})


def same_training(row: Row) -> Hashable:
    """Equal for rows of which the new ones take the place of the old: a way may have had other options. Rows of one GPU stay, as
    those of several are compared with the one of their run."""
    own = row.origin.date if row.column["gpus"] == 1 else None
    return row.mixer, own, *sorted(map(repr, row.column.items()))


def one_gpu_beside(rows: Iterable[Row], row: Row) -> Row | None:
    """The row of one GPU with as much to do that was measured nearest in time to a row of several: in its run, where that had
    one."""
    alone = select(rows, task=TASK, measure=row.measure, mixer=row.mixer, column={**row.column, "gpus": 1, "way": None})
    when = datetime.fromisoformat(row.origin.date)
    return min(alone, key=lambda one: abs(datetime.fromisoformat(one.origin.date) - when), default=None)


def share_of_one_gpu(rows: Iterable[Row], column: Mapping[str, Plain], mixer: str | None = None) -> float | None:
    """Tokens per second of each GPU of a training over those of one GPU alone, with as much to do per GPU; None where it was
    not measured."""
    speeds = list(select(rows, task=TASK, measure="tokens_per_second", mixer=mixer))
    for together in select(speeds, column=column):
        alone = one_gpu_beside(speeds, together)
        if alone is not None and alone.value is not None and together.value is not None:
            return together.value / (int(column["gpus"]) * alone.value)  # type: ignore[arg-type]
    return None


def check_gpus(gpus: Sequence[int], there: int) -> None:
    if not there:
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch sees none")
    if min(gpus) < 1 or max(gpus) > there:
        raise SystemExit(
            f"--gpus must be numbers from 1 to {there}, the GPUs of this machine, got {','.join(map(str, gpus))}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="gdn-1b")
    parser.add_argument("--mixers", help="trained in every preset; own is the mixer of the preset")
    parser.add_argument("--gpus", default="1,2", help="how many GPUs, one training for each number and way")
    parser.add_argument("--ways", default="DDP,FSDP2", help="how several GPUs train, of " + ", ".join(WAYS))
    parser.add_argument("--batch", type=int, default=8, help="rows per GPU and step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row, of divided rows those of each GPU")
    parser.add_argument("--documents", type=int, default=4096, help="tokens of the longest document")
    parser.add_argument("--steps", type=int, default=20, help="that count")
    parser.add_argument("--warm", type=int, default=WARM, help="steps before them")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a training, from its turn to its end")
    parser.add_argument("--timeline", type=Path, help="picture of one step of each training")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    gpus, ways = [int(n) for n in arguments.gpus.split(",")], arguments.ways.split(",")
    if min(arguments.steps, arguments.warm) < 1:
        parser.error(f"--steps and --warm must be at least 1, got {arguments.steps} and {arguments.warm}")
    if not set(ways) <= set(WAYS):
        raise SystemExit(f"--ways must name some of {', '.join(WAYS)}, got {arguments.ways}")
    mixers = [None if name == "own" else name for name in (arguments.mixers or "own").split(",")]
    models = [(name, mixer) for name in arguments.presets.split(",") for mixer in mixers]
    try:
        vocabulary = min(preset(name, **model_options(mixer)).vocab_size for name, mixer in models)
    except ValueError as error:
        parser.error(str(error))
    check_gpus(gpus, torch.cuda.device_count())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends all trainings on the way
    steps = arguments.warm + arguments.steps + (ENDS if arguments.timeline else 0)
    device = find_gpu()
    path = name_file(arguments.results, "scaling", device)
    failed, pictured = [], {}
    with tempfile.TemporaryDirectory() as text, ExitStack() as trained:
        per_process = arguments.batch * (arguments.length + 1)
        write_text(Path(text), vocabulary, 16 * per_process, arguments.documents)
        fields = {
            "length": arguments.length, "batch_size": arguments.batch, "max_steps": steps, "checkpoint_every": steps,
            "log_every": steps, "precision": "bf16", "warm": arguments.warm, "timeline": arguments.timeline is not None,
        }  # fmt: skip
        chosen = [(*model, *one) for model in models for one in trainings(gpus, ways)]
        in_turns = turns([count for *_, count, _ in chosen], torch.cuda.device_count())
        starts = {}
        for place, gpu in ((place, gpu) for turn in in_turns for gpu, place in enumerate(turn)):
            name, mixer, count, way = chosen[place]
            model = {"preset": name, **model_options(mixer)}
            given = {**fields, "model": model, **settings(count, way, arguments.length)}
            process = launched(count, given, Path(text), gpu if count == 1 else None)
            starts[place] = trained.enter_context(process)
        for place, wait in ((place, wait) for turn in in_turns for place, wait in begin(turn, starts, arguments.limit)):
            name, mixer, count, way = chosen[place]
            title = f"{name}{f' with {mixer}' if mixer else ''}, {f'{count} GPUs, {way}' if way else '1 GPU'}"
            try:
                found = wait()
            except subprocess.SubprocessError as error:
                print(f"{title:40} failed: {error}", flush=True)
                failed.append(title)
                continue
            lanes = found.pop("lanes")
            if lanes:
                pictured[title] = lanes
                found |= summarize(lanes)
            size = arguments.batch, arguments.length
            rows = make_training_rows(name, mixer, count, way, *size, found, describe(device))
            replace_rows(path, rows, same_training)
            share = share_of_one_gpu(find_rows(path), rows[0].column, mixer)
            memory, predicted = ((found[name] or 0) / 2**30 for name in ("memory_bytes", "predicted_memory_bytes"))
            print(
                f"{title:40} {found['step_ms']:7.1f} ms  {found['tokens_per_second'] / 1e3:7.1f} k tokens/s  "
                f"{memory:5.1f} GiB, predicted {predicted:.1f}  first step {found['first_step_s']:.1f} s"
                + (f"  {share:.3f} of one GPU each" if share else ""),
                flush=True,
            )
    if pictured:
        draw(pictured, arguments.timeline)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(chosen)} trainings failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
