"""Throughput of long prompts by `vllm bench serve`: a memory beside softmax of the same size in the same server.

    python -m fastweights_studies.measure.serving_bench
    python -m fastweights_studies.measure.serving_bench --launched
    python -m fastweights_studies.measure.serving_bench --mixers gdn,softmax --lengths 16384,65536 --requests 64,32 --memory 45

Needs vLLM (docs/serving.md). A preset with random weights in bfloat16, one server per mixer, all with the same memory for states
and keys. Prompts are random tokens of one length, sent at once; each answer has the same number of tokens. Writes
studies/results/serving-bench-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from fastweights.environment import installed_version
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.presets import preset
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.measure.serving_soak import NAME, save_tokenizer, server
from fastweights_studies.measure.serving_vllm import LAUNCHED
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "serving_bench"
# What is kept of the report of `vllm bench serve`, by its names there.
KEPT = {
    "tokens_per_second": "total_token_throughput",
    "written_tokens_per_second": "output_throughput",
    "first_token_ms": "median_ttft_ms",
    "step_ms": "median_tpot_ms",
    "bench_s": "duration",
}


def save_preset(folder: Path, name: str, mixer: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(preset(name, mixer=mixer)).bfloat16().eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)


def bench(port: int, folder: Path, length: int, tokens: int, requests: int) -> dict[str, Any]:
    """The report of `vllm bench serve` for so many prompts of this length."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run

    options = ["--backend", "openai", "--host", "127.0.0.1", "--port", str(port), "--endpoint", "/v1/completions"]
    options += ["--model", str(folder), "--served-model-name", NAME, "--tokenizer", str(folder)]
    options += ["--dataset-name", "random", "--random-input-len", str(length), "--random-output-len", str(tokens)]
    options += ["--num-prompts", str(requests), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with redirect_stdout(StringIO()):
        return run(parser.parse_args(options))


def make_bench_rows(
    name: str,
    mixer: str,
    length: int,
    tokens: int,
    requests: int,
    memory: float,
    launched: bool,
    report: dict[str, Any],
    origin: Origin,
) -> list[Row]:
    """memory: GiB of the pool. launched: without torch.compile."""
    if report["completed"] != requests:
        raise SystemExit(f"{report['completed']} of {requests} requests were answered")
    values: dict[str, Value] = {ours: report[theirs] for ours, theirs in KEPT.items()}
    column: dict[str, Plain] = {
        "preset": name, "prompt": length, "written": tokens, "requests": requests, "pool_gib": memory, "launched": launched,
    }  # fmt: skip
    return make_rows(TASK, origin, values, mixer=mixer, column=column, run={"vllm": str(installed_version("vllm"))})


def read_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn-340m")
    parser.add_argument("--mixers", default="gdn,softmax")
    parser.add_argument("--lengths", type=read_numbers, default="16384,65536", help="tokens of a prompt")
    parser.add_argument("--requests", type=read_numbers, default="64,32", help="for each length")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--memory", type=float, default=45, help="GiB for states or keys and values, for each server")
    parser.add_argument("--launched", action="store_true", help="without torch.compile, which starts sooner")
    parser.add_argument("--options", default="", help="more of vllm serve, parted by spaces")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, "serving-bench", device), describe(device)
    options = ["--max-model-len", str(max(asked.lengths) + asked.tokens + 16), "--memory", str(asked.memory)]
    options += ["--no-enable-prefix-caching", "--gpu-memory-utilization", "0.4", *asked.options.split()]
    options += ["--compilation-config", json.dumps(LAUNCHED)] if asked.launched else []
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folders: dict[str, Path] = {mixer: Path(name, mixer) for mixer in asked.mixers.split(",")}
        for mixer, folder in folders.items():
            save_preset(folder, asked.preset, mixer)
        gc.collect()
        torch.cuda.empty_cache()
        ports = start_all(servers, folders, Path(name), options)
        for mixer, port in ports.items():
            # Once before: kernels are compiled and graphs are captured at the first steps of each size.
            bench(port, folders[mixer], asked.lengths[0], asked.tokens, asked.requests[0])
            for length, requests in zip(asked.lengths, asked.requests, strict=True):
                report = bench(port, folders[mixer], length, asked.tokens, requests)
                rows = make_bench_rows(
                    asked.preset, mixer, length, asked.tokens, requests, asked.memory, asked.launched, report, origin
                )
                replace_rows(path, rows)
                print(
                    f"{asked.preset} with {mixer}, {requests} prompts of {length:,} tokens: "
                    f"{report['total_token_throughput']:,.0f} tokens/s, {report['output_throughput']:,.0f} written; "
                    f"first token {report['median_ttft_ms']:.0f} ms, then {report['median_tpot_ms']:.2f} ms",
                    flush=True,
                )


def start_all(servers: ExitStack, folders: dict[str, Path], place: Path, options: Sequence[str]) -> dict[str, int]:
    """The ports of servers of these models, which start at the same time."""
    with ThreadPoolExecutor() as pool:
        started = [server(folder, place / f"{mixer}.log", options) for mixer, folder in folders.items()]
        return dict(zip(folders, pool.map(servers.enter_context, started), strict=True))


if __name__ == "__main__":
    main()
