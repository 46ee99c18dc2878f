"""The judge of the GPU kernels: correctness first, then time, memory and the distance from the floor, beside the peers.

    python -m fastweights_studies.measure.kernels --check                correctness alone, every length, shape, dtype, packed
    python -m fastweights_studies.measure.kernels                        time every op at the default sizes, in bfloat16
    python -m fastweights_studies.measure.kernels --only gdn,pgdn --sizes 4,2048,8,128,128 --backend torch
    python -m fastweights_studies.measure.kernels --decode               one token for 64 sequences, and nothing else
    python -m fastweights_studies.measure.kernels --cold                 the first call from an empty kernel cache, and nothing else
    python -m fastweights_studies.measure.kernels --no-peers --checks 4  ours alone: all are checked first, four at a time
    python -m fastweights_studies.measure.kernels --warm-peers 16        before timing, compile the peers' kernels in 16 processes
    python -m fastweights_studies.measure.kernels --against CHECKOUT     device time and memory beside another checkout, ours alone
    python -m fastweights_studies.pages.performance                    docs/performance.md from the result files

An op whose values or gradients, with initial and final states too, exceed the error budgets against float64, or twice the error
of a PyTorch twin of the same precision, gets no time. Times are medians of interleaved calls: `eager` as called, `graph` as a
replayed CUDA graph, which is device time alone. Peers are timed where they are installed (flash-linear-attention 0.6) and their
errors are reported too.

With --against, exit code 1 says that an op takes more than --tolerance times the other checkout's device time or memory.

Result files, written after every op and continued by the next run of the same Python files (so a run may be split with
--only): kernel-checks-<device>.json, kernels-<device>.json, kernels-against-<device>.json and peer-tuning-<device>.json in
--results. kernels-<device>.json also keeps the rows of older files that are not measured again, and says of which.

The peers tune themselves at their first call: 150 to 365 s an op from an empty cache, the most of it compiling. --warm-peers
compiles in parallel; the choices are then timed in this process alone and kept in peer-tuning-<device>.json, which makes the
next machine compile only what was chosen. FLA_CACHE_RESULTS and TRITON_CACHE_AUTOTUNING, which make Triton keep choices in
TRITON_CACHE_DIR, are set by this program; the peers' own FLA_CONFIG_DIR and FLA_CACHE_MODE are not needed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights_studies.measure.environment import commit, file_suffix, source
from fastweights_studies.measure.judge import measuring, tuning
from fastweights_studies.measure.judge.against import compare
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.checks import check_all, combinations, worst
from fastweights_studies.measure.judge.cold import cold_start
from fastweights_studies.measure.judge.decoding import SIZES as DECODING
from fastweights_studies.measure.judge.decoding import judge_decoding
from fastweights_studies.measure.judge.peers import is_installed
from fastweights_studies.measure.judge.records import RESULTS, Record
from fastweights_studies.measure.judge.timing import Ceilings

SIZES = ("4,2048,8,128,128", "1,8192,16,128,128", "1,32768,8,128,128")
MORE_SIZES = ("8,2048,16,96,192",)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(names: list[str], arguments: argparse.Namespace, device: str, suffix: str) -> bool:
    """Prints a line for every combination that fails, and the worst errors by op."""
    started, seed = time.time(), arguments.seed if arguments.seed is not None else int(time.time()) % 2**31
    record = Record(arguments.results, f"kernel-checks-{suffix}.json", {"device": device, "backend": arguments.backend})
    chosen = [what for what in combinations() if arguments.combination in str(what)]
    print(f"{len(chosen)} combinations of {len(names)} ops, seed {seed}", flush=True)
    rows: dict[str, Any] = {}
    for key, row in check_all(names, arguments.device, arguments.backend, seed, arguments.jobs, chosen):
        rows[key] = row
        record.add_row(key, {"failures": [], **row, "seed": seed})
        if row["failures"]:
            print(f"FAILED {key}: {'; '.join(row['failures'])}", flush=True)
    record.add(worst=worst(record.rows))
    for op, precisions in worst(rows).items():
        for precision, errors in precisions.items():
            print(f"worst {op:12s} {precision:5s} {'  '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
    failed = sum(bool(row["failures"]) for row in rows.values())
    print(f"{len(rows) - failed} passed, {failed} failed, {time.time() - started:.0f} s; written to {record.path}")
    return failed == 0


def show(key: str, row: Mapping[str, Any]) -> None:
    if "refused" in row:
        print(f"{key:30s} no time: {'; '.join(row['refused'])}", flush=True)
    for who, why in row.get("failed", {}).items():
        print(f"{key:30s} {who} does not run: {why}", flush=True)
    for stage in ("forward", "forward_backward", "decode"):
        if stage not in row:
            continue
        part = row[stage]
        cells = []
        for who in part["graph"]:
            memory = f", {part['peak_mb'][who]:.0f} MB" if "peak_mb" in part else ""
            cells.append(f"{who} {part['graph'][who][0]:.3f} (eager {part['eager'][who][0]:.2f}{memory})")
        ours = part["graph"]["ours"][0]
        beside = ""
        if "fla" in part["graph"]:
            beside = f"  ours/fla {ours / part['graph']['fla'][0]:.2f}"
            if "peak_mb" in part:
                beside += f", memory {part['peak_mb']['ours'] / part['peak_mb']['fla']:.2f}"
        reached = f"floor {part['floor_ms']:.3f} ({part['floor_ms'] / ours:.0%})"
        print(f"{key:30s} {stage:16s} {reached}{beside}  {'  '.join(cells)}", flush=True)
    if "seconds" in row:
        print(f"{key:30s} took {', '.join(f'{what} {s:.0f} s' for what, s in row['seconds'].items())}", flush=True)


def measure(names: list[str], arguments: argparse.Namespace, device: str, suffix: str) -> None:
    started, dtype = time.time(), getattr(torch, arguments.dtype)
    with_peers = not (arguments.no_peers or arguments.cold)
    choices = arguments.results / f"peer-tuning-{suffix}.json"
    sizes = [Sizes.read(text) for text in arguments.sizes or SIZES]
    if with_peers and is_installed():
        for path in (RESULTS / choices.name, choices):
            tuning.load_choices(path)
        tuning.time_shortly()
        if arguments.warm_peers and not arguments.decode:
            tuning.warm_peers(names, sizes, arguments.dtype, arguments.warm_peers)
            print(f"peers' kernels compiled after {time.time() - started:.0f} s", flush=True)
    ceilings = Ceilings.measure()
    print(f"{device}: copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 product {ceilings.rate / 1e12:.0f} TFLOP/s")
    head = {
        "device": device, "dtype": arguments.dtype, "backend": arguments.backend, "triton": version("triton"),
        "fla": version("fla-core"), "ceilings": ceilings._asdict(),
    }  # fmt: skip
    record = Record(arguments.results, f"kernels-{suffix}.json", head, keep_older=True)

    def add(key: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            row = work()
        except Exception as error:  # the other ops are worth measuring
            row = measuring.refusal(error)
        record.rows.pop(key, None)
        record.add_row(key, row)
        show(key, row)
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
    for name in names:
        if arguments.cold:
            for shape in sizes:
                cold = cold_start(name, shape, arguments.dtype, arguments.backend)
                key = f"{name} first call {shape}"
                record.add_row(key, cold)
                for cache in ("empty_cache", "warm_cache"):
                    stages = ", ".join(f"{stage} {s:.2f}" for stage, s in cold[f"{cache}_stages_s"].items())
                    print(f"{key:40s} {cache} {cold[f'{cache}_s']:.1f} s: {stages}", flush=True)
            continue
        for shape in [] if arguments.decode else sizes:
            add(f"{name} {shape}", partial(measuring.measure, name, shape, *shared, checked.get((name, shape))))
        add(f"{name} decode {DECODING}", partial(judge_decoding, name, *shared))
    print(f"written to {record.path} after {time.time() - started:.0f} s")


def compare_checkouts(names: list[str], arguments: argparse.Namespace, device: str, suffix: str) -> bool:
    """Prints a line per op, size and stage; whether all are within the tolerance."""
    base = {"commit": commit(arguments.against), "source": source(arguments.against)}
    head = {"device": device, "dtype": arguments.dtype, "triton": version("triton"), "against": base}
    record = Record(arguments.results, f"kernels-against-{suffix}.json", head)
    worse = []
    for key, row in compare(arguments.against, names, arguments.sizes or SIZES, arguments.dtype):
        record.add_row(key, row)
        if max(row["time_ratio"], row["memory_ratio"]) > arguments.tolerance:
            worse.append(key)
        print(
            f"{key:50s} {row['ms']['ours']:.4f} ms, base {row['ms']['base']:.4f}, ratio {row['time_ratio']:.3f}; "
            f"{row['mb']['ours']:.0f} MB, base {row['mb']['base']:.0f}, ratio {row['memory_ratio']:.3f}",
            flush=True,
        )
    print(f"{len(worse)} over {arguments.tolerance}: {', '.join(worse) or 'none'}; written to {record.path}")
    return not worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"ops, of {', '.join(CASES)}")
    parser.add_argument("--check", action="store_true", help="correctness alone, without times and peers")
    parser.add_argument("--combination", default="", help="with --check: only those whose printed name holds this text")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="processes of --check")
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
    parser.add_argument("--tolerance", type=float, default=1.03, help="of --against: largest ratio")
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
    suffix = file_suffix(device)
    if arguments.check:
        raise SystemExit(0 if check(names, arguments, device, suffix) else 1)
    if arguments.against:
        raise SystemExit(0 if compare_checkouts(names, arguments, device, suffix) else 1)
    measure(names, arguments, device, suffix)


if __name__ == "__main__":
    main()
