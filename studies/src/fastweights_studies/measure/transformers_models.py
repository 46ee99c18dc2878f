"""Models of transformers as they are and with `fastweights.integrations.transformers.accelerate()`.

    python -m fastweights_studies.measure.transformers_models
    python -m fastweights_studies.measure.transformers_models --only qwen3_next --rounds 10

Few layers of real widths with random weights in bfloat16. For each a training step (forward, backward, fused AdamW), reading a
prompt with a cache, and 16 tokens after it. Both sides take turns in one process, on the same model, and decode at the same
lengths, each time from a copy of one cache: attention of cuDNN plans anew at each length that it has not seen. What transformers
runs without us is its PyTorch code, or flash-linear-attention: where that is installed, every row is measured beside each of the
two. It refuses the backward of the gated delta rule on Hopper with Triton from 3.4 to 3.7.0, whose gradients are wrong there; it
is timed with the refusal taken out. Its kernels are tuned at their first call: before the rows, parallel processes compile all
variants (`judge/tuning.py`), and the first row that needs a kernel times them, alone.

Every row is measured in a process of its own, with a limit of time, and written when it is known. Writes
studies/results/transformers-models-<device>.json, and transformers-models-and-fla-<device>.json beside
flash-linear-attention. Rows that are not measured again, or fail, stay as they are.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from fastweights.integrations.transformers import accelerate, restore
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge import tuning
from fastweights_studies.measure.judge.peers import is_installed
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "transformers"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED = {"num_hidden_layers": 4, "vocab_size": 32768, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
BESIDE = PYTORCH, FLA = "PyTorch", "flash-linear-attention"
PHASES = ("training_step", "prompt", "decoding")
NEW = 16  # tokens of decoding


class Measured(NamedTuple):
    """A model, and the sizes of its batches: [B, T] of a training step and of a prompt."""

    config: str
    options: dict[str, Any]
    train: tuple[int, int]
    prompt: tuple[int, int]


QWEN3_NEXT = Measured(
    # Widths and heads of Qwen3-Next-80B-A3B, with one wide MLP in the place of 512 experts.
    "Qwen3NextConfig", {"hidden_size": 2048, "intermediate_size": 5632, "mlp_only_layers": [0, 1, 2, 3]},
    train=(4, 4096), prompt=(1, 16384),
)  # fmt: skip
KIMI_LINEAR = Measured(
    # Widths and heads of Kimi-Linear-48B-A3B, likewise.
    "KimiLinearConfig", {"hidden_size": 2304, "intermediate_size": 9216, "mlp_layer_types": ["dense"] * 4},
    train=(4, 4096), prompt=(1, 16384),
)  # fmt: skip
BESIDE_FLA = {"qwen3_next": QWEN3_NEXT, "kimi_linear": KIMI_LINEAR}
# PyTorch's form of Kimi's memory takes too much space for more tokens.
BESIDE_PYTORCH = {**BESIDE_FLA, "kimi_linear": KIMI_LINEAR._replace(train=(1, 2048), prompt=(1, 2048))}


def make_config(sizes: Measured) -> Any:
    return getattr(transformers, sizes.config)(**{**SHARED, "layer_types": LAYERS, **sizes.options})


def build(sizes: Measured, device: str = DEVICE) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(make_config(sizes), dtype=torch.bfloat16)


class Phase(NamedTuple):
    """`call` is timed. It takes what `prepare` returns, which is not."""

    call: Callable[..., Any]
    prepare: Callable[[], Any] = tuple


def phases(model: Any, sizes: Measured) -> dict[str, Phase]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens, prompt = (
        torch.randint(1, model.config.vocab_size, size, device=DEVICE) for size in (sizes.train, sizes.prompt)
    )

    def train() -> Tensor:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def read() -> Any:
        return model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def decode(state: Any) -> None:
        for _ in range(NEW):
            model(prompt[:, :1], past_key_values=state, use_cache=True)

    @cache
    def after_prompt() -> Any:
        return read()

    timed = Phase(train), Phase(read), Phase(decode, lambda: [copy.deepcopy(after_prompt())])
    return dict(zip(PHASES, timed, strict=True))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(phase: Phase) -> float:
    arguments = phase.prepare()
    synchronize()
    began = time.perf_counter()
    phase.call(*arguments)
    synchronize()
    return 1e3 * (time.perf_counter() - began)


def measure(sizes: Measured, title: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of every turn and the peak of memory of one phase, by side."""
    model = build(sizes)
    phase = phases(model, sizes)[title]
    times: dict[str, list[float]] = {"transformers": [], "fastweights": []}
    memory = {}
    for turn in range(rounds + 1):
        for side, found in times.items():
            accelerate(model) if side == "fastweights" else restore()
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = milliseconds(phase)
            memory[side] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
            if turn:  # the first compiles
                found.append(took)
    restore()
    return {"turns_ms": times, "peak_bytes": memory}


def make_phase_rows(
    name: str, sizes: Measured, phase: str, with_fla: bool, found: Mapping[str, Mapping[str, Any]], origin: Origin
) -> list[Row]:
    """One row per turn, whose median is the time of the phase, and one for the peak of memory of each side."""
    batch, length = sizes.train if phase == PHASES[0] else sizes.prompt
    column: dict[str, Plain] = {
        "model": name, "phase": phase, "batch": batch, "length": length, "new": NEW * (phase == PHASES[2]), "fla": with_fla,
    }  # fmt: skip
    rows = []
    for side, times in found["turns_ms"].items():
        own = {**column, "accelerated": side == "fastweights"}
        for turn, milliseconds in enumerate(times):
            rows += make_rows(TASK, origin, {"phase_ms": milliseconds}, column=own, run={"turn": turn})
        rows += make_rows(TASK, origin, {"peak_bytes": found["peak_bytes"][side]}, column=own)
    return rows


def measured_in_one_phase(row: Row) -> Hashable:
    return row.task, *(row.column[name] for name in ("model", "phase", "fla"))


def measured_alone(
    sizes: Measured, title: str, rounds: int, *, with_fla: bool, limit: float, share: int | None = None
) -> dict[str, Any]:
    """`measure` in a process of its own. A SubprocessError where it fails or exceeds the limit, in seconds.

    share: if given, the process only compiles this share of the variants of flash-linear-attention's kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, row = Path(folder, "wanted.json"), Path(folder, "row.json")
        asked = {"sizes": sizes, "title": title, "rounds": rounds, "with_fla": with_fla, "share": share}
        wanted.write_text(json.dumps(asked))
        subprocess.run([sys.executable, __file__, "--worker", wanted, row], timeout=limit, check=True)
        return json.loads(row.read_text())


def compile_fla(chosen: Sequence[str], limit: float) -> None:
    """Compile the variants of flash-linear-attention's kernels for these models, in parallel. A row compiles what failed here."""

    def one(name: str, title: str, share: int) -> None:
        # Small in all that kernels are not compiled for. A batch of 1 is a case of its own for Triton.
        sizes = BESIDE_FLA[name]
        small = sizes._replace(options={**sizes.options, "vocab_size": 1024}, train=(2, 1024), prompt=(1, 2048))
        try:
            measured_alone(small, title, 0, with_fla=True, limit=limit, share=share)
        except subprocess.SubprocessError as error:
            print(f"{name} {title}: variants not compiled: {error}", flush=True)

    work = [(name, title, share) for name in chosen for title in PHASES[:2] for share in range(tuning.PARTS)]
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(lambda arguments: one(*arguments), work))


def work(wanted: Path, row: Path) -> None:
    """What a process that `measured_alone` started does."""
    asked = json.loads(wanted.read_text())
    if not asked["with_fla"]:
        sys.modules["fla"] = None  # type: ignore[assignment]  # transformers then does not find it
    else:
        tuning.keep_choices()
        if not is_installed():
            raise SystemExit("flash-linear-attention is not installed")
        if asked["share"] is not None:
            compiled = tuning.compile_only(asked["share"])
            sizes = Measured(*asked["sizes"])
            phases(build(sizes), sizes)[asked["title"]].call()
            row.write_text(json.dumps({"compiled": compiled()}))
            return
        tuning.time_shortly()
    row.write_text(json.dumps(measure(Measured(*asked["sizes"]), asked["title"], asked["rounds"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BESIDE_FLA), help="models, separated by commas")
    parser.add_argument("--beside", choices=BESIDE, action="append", help="only beside this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each side")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a row, from its imports on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(BESIDE_FLA):
        parser.error(f"--only must name models of {', '.join(BESIDE_FLA)}, got {', '.join(sorted(unknown))}")
    if FLA in (arguments.beside or ()) and not is_installed():
        parser.error(f"--beside {FLA}: it is not installed")
    device, failed = find_gpu(), []
    for beside in arguments.beside or (BESIDE if is_installed() else (PYTORCH,)):
        with_fla = beside == FLA
        path = name_file(arguments.results, f"transformers-models{'-and-fla' * with_fla}", device)
        if with_fla:
            compile_fla(chosen, arguments.limit)
        for name in chosen:
            sizes = (BESIDE_FLA if with_fla else BESIDE_PYTORCH)[name]
            for title in PHASES:
                label = f"{name:12} {title:14} beside {beside}"
                try:
                    row = measured_alone(sizes, title, arguments.rounds, with_fla=with_fla, limit=arguments.limit)
                except subprocess.SubprocessError as error:
                    print(f"{label}: failed: {error}", flush=True)
                    failed.append(label)
                    continue
                print(f"{label}: {shown(row)}", flush=True)
                origin = describe(device, transformers=transformers.__version__)
                rows = make_phase_rows(name, sizes, title, with_fla, row, origin)
                replace_rows(path, rows, measured_in_one_phase)
    if failed:
        raise SystemExit(f"{len(failed)} rows failed: {'; '.join(failed)}")


def shown(row: dict[str, Any]) -> str:
    middle = {side: median(times) for side, times in row["turns_ms"].items()}
    sides = (f"{side} {ms:.2f} ms {row['peak_bytes'][side] / 2**30:.1f} GiB" for side, ms in middle.items())
    return f"{', '.join(sides)}, {middle['transformers'] / middle['fastweights']:.2f} times faster"


if __name__ == "__main__":
    main()
