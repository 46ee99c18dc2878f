"""The judge of the GPU kernels: correctness first, then time, memory and the distance from the floor, beside the peers.

Commands, each `python -m fastweights_studies.measure.kernels` with these options:
    (none)                  time every op at the default sizes, in bfloat16
    --check                 correctness alone, every length, shape, dtype, packed
    --only gdn,pgdn --sizes 4,2048,8,128,128 --backend torch
    --decode                one token for 64 sequences, and nothing else
    --cold                  the first call from an empty kernel cache, and nothing else
    --no-peers --checks 4   ours alone: all are checked first, four at a time
    --warm-peers 16         before timing, compile the peers' kernels in 16 processes
    --against CHECKOUT      device time and memory beside another checkout, ours alone

`python -m fastweights_studies.pages` writes docs/performance.md from the result files.

An op whose values or gradients, with initial and final states too, exceed the error budgets against float64, or twice the error
of a PyTorch twin of the same precision, gets no time. Times are medians of interleaved calls: `eager` as called, `graph` as a
replayed CUDA graph, which is device time alone. Peers are timed where they are installed (flash-linear-attention 0.6) and their
errors are reported too. The backward of FlashQLA (flash-qla 0.1) cannot be captured: beside it the kernels' own times are summed.

With --against, exit code 1 says that an op takes more than --tolerance times the other checkout's device time or memory.

Result files, written after every op (so a run may be split with --only): kernel-checks-<device>.json, kernels-<device>.json and
kernels-against-<device>.json in --results. Rows that are not measured again stay; each says of which files it is.

The peers tune themselves at their first call: 150 to 365 s an op from an empty cache, the most of it compiling. --warm-peers
compiles in parallel; the choices are then timed in this process alone and kept in peer_tuning/choices-<device>.json, which
makes the next machine compile only what was chosen. FLA_CACHE_RESULTS and TRITON_CACHE_AUTOTUNING, which make Triton keep
choices in TRITON_CACHE_DIR, are set by this program; the peers' own FLA_CONFIG_DIR and FLA_CACHE_MODE are not needed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights_studies.measure.environment import describe, describe_checkout
from fastweights_studies.measure.judge import measuring, records, tuning
from fastweights_studies.measure.judge.against import compare, warm_checkouts
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.checks import check_all, combinations
from fastweights_studies.measure.judge.cold import cold_starts
from fastweights_studies.measure.judge.decoding import SIZES as DECODING
from fastweights_studies.measure.judge.decoding import judge_decoding
from fastweights_studies.measure.judge.peers import is_installed
from fastweights_studies.measure.judge.timing import Ceilings
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS, ROOT
from fastweights_studies.record import Origin, Row

SIZES = ("4,2048,8,128,128", "1,8192,16,128,128", "1,32768,8,128,128")
MORE_SIZES = ("8,2048,16,96,192",)
AGAINST = "kernels_against"
TOLERANCE = 1.03  # of --against: largest ratio


def check(names: list[str], arguments: argparse.Namespace, device: str) -> bool:
    """Prints a line for every combination that fails, and the worst errors by op."""
    started, seed = time.time(), arguments.seed if arguments.seed is not None else int(time.time()) % 2**31
    path, origin = name_file(arguments.results, "kernel-checks", device), describe(device)
    jobs = arguments.jobs or min(os.cpu_count() or 1, 16)
    chosen = [what for what in combinations() if arguments.combination in str(what)]
    print(f"{len(chosen)} combinations of {len(names)} ops, seed {seed}", flush=True)
    rows: list[Row] = []
    passed = []
    for op, what, found in check_all(names, arguments.device, arguments.backend, seed, jobs, chosen):
        new = records.make_check_rows(op, what, arguments.backend, seed, found, origin)
        replace_rows(path, new, records.measured_with_an_op)
        rows += new
        passed.append(not found["failures"])
        if found["failures"]:
            print(f"FAILED {op} {what}: {'; '.join(map(str, found['failures']))}", flush=True)
    for (op, precision), errors in records.worst_errors(rows).items():
        print(f"worst {op:12s} {precision:5s} {'  '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
    failed = passed.count(False)
    print(f"{passed.count(True)} passed, {failed} failed, {time.time() - started:.0f} s; written to {path}")
    return failed == 0


def show(key: str, row: Mapping[str, Any]) -> None:
    if "refused" in row:
        print(f"{key:30s} no time: {'; '.join(map(str, row['refused']))}", flush=True)
    for who, why in row.get("failed", {}).items():
        print(f"{key:30s} {who} does not run: {why}", flush=True)
    for stage in ("forward", "forward_backward", "decode"):
        if stage not in row:
            continue
        part = row[stage]
        cells = []
        for who in part["graph"]:
            memory = f", {part['peak_bytes'][who] / 2**20:.0f} MB" if "peak_bytes" in part else ""
            cells.append(f"{who} {part['graph'][who][0]:.3f} (eager {part['eager'][who][0]:.2f}{memory})")
        ours = part["graph"]["ours"][0]
        beside = ""
        for who, spread in part.get("kernels", {}).items():
            cells.append(f"kernels of {who} {spread[0]:.3f}")
        if "fla" in part["graph"]:
            beside = f"  ours/fla {ours / part['graph']['fla'][0]:.2f}"
            if "peak_bytes" in part:
                beside += f", memory {part['peak_bytes']['ours'] / part['peak_bytes']['fla']:.2f}"
        reached = f"floor {part['floor_ms']:.3f} ({part['floor_ms'] / ours:.0%})"
        print(f"{key:30s} {stage:16s} {reached}{beside}  {'  '.join(cells)}", flush=True)


def measure(names: list[str], arguments: argparse.Namespace, device: str) -> None:
    started, dtype = time.time(), getattr(torch, arguments.dtype)
    with_peers = not (arguments.no_peers or arguments.cold)
    choices = tuning.choices_file(arguments.results, device)
    sizes = [Sizes.read(text) for text in arguments.sizes or SIZES]
    if with_peers and is_installed():
        for path in (tuning.choices_file(RESULTS, device), choices):
            tuning.load_choices(path)
        tuning.time_shortly()
        if arguments.warm_peers and not arguments.decode:
            tuning.warm_peers(names, sizes, arguments.dtype, arguments.warm_peers)
            print(f"peers' kernels compiled after {time.time() - started:.0f} s", flush=True)
    ceilings, origin = Ceilings.measure(), describe(device)
    print(f"{device}: copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 product {ceilings.rate / 1e12:.0f} TFLOP/s")
    file = name_file(arguments.results, "kernels", device)
    replace_rows(file, records.make_ceiling_rows(ceilings, origin))
    given = arguments.dtype, arguments.backend

    def add(key: str, name: str, shape: Sizes, work: Callable[[], dict[str, Any]], **known: Any) -> None:
        try:
            found = work()
        except Exception as error:  # the other ops are worth measuring
            found = {**measuring.refusal(error), **known}
        replace_rows(file, records.make_time_rows(name, shape, *given, found, origin), records.measured_with_an_op)
        show(key, found)
        torch.cuda.empty_cache()
        if with_peers and is_installed():
            tuning.save_choices(choices)

    shared = (dtype, arguments.backend, arguments.repeats, ceilings, with_peers)
    checked: dict[tuple[str, Sizes], dict[str, Any]] = {}
    if arguments.checks > 1 and not (arguments.cold or arguments.decode):
        asked = [(name, shape) for name in names for shape in sizes]
        for name, shape, row in measuring.check_several(asked, dtype, arguments.backend, arguments.checks):
            checked[name, shape] = row
        print(f"{len(checked)} checked after {time.time() - started:.0f} s", flush=True)
    if arguments.cold:
        measure_cold([(name, shape) for name in names for shape in sizes], arguments, file, origin)
    for name in [] if arguments.cold else names:
        for shape in [] if arguments.decode else sizes:
            work = partial(measuring.measure, name, shape, *shared, checked.get((name, shape)))
            add(f"{name} {shape}", name, shape, work)
        work = partial(judge_decoding, name, *shared)
        add(f"{name} decode {DECODING}", name, DECODING, work, in_place=True)
    print(f"written to {file} after {time.time() - started:.0f} s")


def measure_cold(asked: Sequence[tuple[str, Sizes]], arguments: argparse.Namespace, file: Path, origin: Origin) -> None:
    """The first calls of ops at sizes, as many at once as there are jobs."""
    given, jobs = (arguments.dtype, arguments.backend), min(arguments.jobs or 1, len(asked))
    for (name, shape), cold in zip(asked, cold_starts(asked, *given, jobs)):
        rows = records.make_cold_rows(name, shape, *given, cold, jobs, origin)
        replace_rows(file, rows, records.measured_with_an_op)
        for cache in ("empty_cache", "warm_cache"):
            stages = ", ".join(f"{stage} {s:.2f}" for stage, s in cold[f"{cache}_stages_s"].items())
            print(f"{name} first call {shape}: {cache} {cold[f'{cache}_s']:.1f} s: {stages}", flush=True)


def compare_checkouts(
    base: Path, names: Sequence[str], sizes: Sequence[str], dtype: str, tolerance: float, results: Path, device: str
) -> bool:
    """Prints a line per op, size and stage; whether all are within the tolerance."""
    path = name_file(results, "kernels-against", device)
    origins = {"after": describe_checkout(ROOT, device), "before": describe_checkout(base.resolve(), device)}
    worse = []
    for one in compare(base, names, sizes, dtype):
        rows = [
            row
            for which, origin in origins.items()
            for row in make_rows(
                AGAINST,
                origin,
                {"device_ms": one.ms[which], "peak_bytes": one.peak_bytes[which]},
                column={
                    "op": one.op,
                    **records.sizes_column(Sizes.read(one.sizes)),
                    "dtype": dtype,
                    "stage": one.stage,
                    "checkout": which,
                },
            )
        ]
        replace_rows(path, rows)
        key = f"{one.op} {one.sizes} {one.stage}"
        if max(one.time_ratio, one.memory_ratio) > tolerance:
            worse.append(key)
        mega = {which: memory / 2**20 for which, memory in one.peak_bytes.items()}
        print(
            f"{key:50s} {one.ms['after']:.4f} ms, base {one.ms['before']:.4f}, ratio {one.time_ratio:.3f}; "
            f"{mega['after']:.0f} MB, base {mega['before']:.0f}, ratio {one.memory_ratio:.3f}",
            flush=True,
        )
    print(f"{len(worse)} over {tolerance}: {', '.join(worse) or 'none'}; written to {path}")
    return not worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"ops, of {', '.join(CASES)}")
    parser.add_argument("--check", action="store_true", help="correctness alone, without times and peers")
    parser.add_argument("--combination", default="", help="with --check: only those whose printed name holds this text")
    parser.add_argument("--jobs", type=int, help="processes: of --check 16 or one per core, of --cold one if not given")
    parser.add_argument("--seed", type=int, help="of --check; another one each time if not given")
    parser.add_argument(
        "--sizes", action="append", help=f"B,T,H,K,V; may be repeated; {' and '.join(SIZES)} if not given; also of interest: "
        f"{' and '.join(MORE_SIZES)}",
    )  # fmt: skip
    parser.add_argument("--decode", action="store_true", help="time single-token decode alone")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the times")
    parser.add_argument("--backend", default="auto", help="of our ops")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cold", action="store_true", help="time the first call in a new process alone")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--checks", type=int, default=1, metavar="N", help="with --no-peers: check all first, N at a time"
    )
    parser.add_argument(
        "--against", type=Path, help="another checkout: compare device time and memory with it, nothing else"
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of --against: largest ratio")
    parser.add_argument(
        "--warm",
        type=int,
        default=0,
        metavar="N",
        help="with --against: compile the kernels of both first, N at a time",
    )
    parser.add_argument("--warm-peers", type=int, default=0, metavar="N", help="compile the peers first, N at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.checks > 1 and not arguments.no_peers:
        parser.error("--checks needs --no-peers: peers tune themselves when they are checked, alone on the device")
    known = list(CASES)
    names = known if arguments.only is None else arguments.only.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}; choose from {', '.join(known)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("the kernels are judged on a CUDA device, and this machine has none")
    tuning.keep_choices()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    if arguments.check:
        raise SystemExit(0 if check(names, arguments, device) else 1)
    if arguments.against:
        sizes, dtype = arguments.sizes or SIZES, arguments.dtype
        if arguments.warm:
            warm_checkouts(arguments.against, names, sizes, dtype, arguments.warm)
        within = compare_checkouts(
            arguments.against, names, sizes, dtype, arguments.tolerance, arguments.results, device
        )
        raise SystemExit(0 if within else 1)
    measure(names, arguments, device)


if __name__ == "__main__":
    main()
