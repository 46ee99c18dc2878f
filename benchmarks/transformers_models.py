"""Models of transformers as they are and with `fastweights.integrations.transformers.accelerate()`.

    python benchmarks/transformers_models.py
    python benchmarks/transformers_models.py --only qwen3_next --rounds 10

Few layers of real widths with random weights in bfloat16. For each a training step (forward, backward, fused AdamW), reading a
prompt with a cache, and 16 tokens after it. Both sides take turns in one run, on the same model, and decode at the same lengths,
each time from a copy of one cache: attention of cuDNN plans anew at each length that it has not seen. What transformers runs
without us is its PyTorch code, or flash-linear-attention where that is installed. That package refuses the backward of the gated
delta rule on Hopper with Triton from 3.4 to 3.7.0, whose gradients are wrong there; it is timed with the refusal taken out.
Writes benchmarks/results/transformers-models-<device>.json, or transformers-models-and-fla-<device>.json with
flash-linear-attention.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from environment import describe, file_suffix, write_json
from judge.peers import is_installed
from torch import Tensor

from fastweights.integrations.transformers import accelerate, restore

RESULTS = Path(__file__).parent / "results"
SHARED = {"num_hidden_layers": 4, "vocab_size": 32768, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]


class Measured(NamedTuple):
    """A model, and the sizes of its batches: [B, T] of a training step and of a prompt."""

    config: str
    options: dict[str, Any]
    train: tuple[int, int]
    prompt: tuple[int, int]


MODELS = {
    # Widths and heads of Qwen3-Next-80B-A3B, with one wide MLP in the place of 512 experts.
    "qwen3_next": Measured(
        "Qwen3NextConfig", {"hidden_size": 2048, "intermediate_size": 5632, "mlp_only_layers": [0, 1, 2, 3]},
        train=(4, 4096), prompt=(1, 16384),
    ),
    # Widths and heads of Kimi-Linear-48B-A3B, likewise. PyTorch's form of its memory takes too much space for more tokens.
    "kimi_linear": Measured(
        "KimiLinearConfig", {"hidden_size": 2304, "intermediate_size": 9216, "mlp_layer_types": ["dense"] * 4},
        train=(1, 2048), prompt=(1, 2048),
    ),
}  # fmt: skip


def build(name: str, device: str = "cuda") -> torch.nn.Module:
    config = getattr(transformers, MODELS[name].config)(**{**SHARED, "layer_types": LAYERS, **MODELS[name].options})
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Phase(NamedTuple):
    """`call` is timed. It takes what `prepare` returns, which is not."""

    call: Callable[..., Any]
    prepare: Callable[[], Any] = tuple


def phases(model: torch.nn.Module, sizes: Measured) -> dict[str, Phase]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens, prompt = (
        torch.randint(1, SHARED["vocab_size"], size, device="cuda") for size in (sizes.train, sizes.prompt)
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
        for _ in range(16):
            model(prompt[:, :1], past_key_values=state, use_cache=True)

    @cache
    def after_prompt() -> Any:
        return read()

    return {
        "training step": Phase(train), "prompt": Phase(read),
        "16 tokens": Phase(decode, lambda: [copy.deepcopy(after_prompt())]),
    }  # fmt: skip


def milliseconds(phase: Phase) -> float:
    arguments = phase.prepare()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    phase.call(*arguments)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def measure(name: str, rounds: int) -> dict[str, Any]:
    model, result = build(name), {}
    for title, phase in phases(model, MODELS[name]).items():
        times: dict[str, list[float]] = {"transformers": [], "fastweights": []}
        memory = {}
        for step in range(rounds + 1):
            for side, found in times.items():
                accelerate(model) if side == "fastweights" else restore()
                torch.cuda.reset_peak_memory_stats()
                took = milliseconds(phase)
                memory[side] = torch.cuda.max_memory_allocated() / 2**30
                if step:  # the first compiles
                    found.append(took)
        middle = {side: median(found) for side, found in times.items()}
        result[title] = {
            "ms": middle, "all, ms": times, "peak, GiB": memory,
            "times faster": middle["transformers"] / middle["fastweights"],
        }  # fmt: skip
        shown = ", ".join(f"{side} {ms:.2f} ms {memory[side]:.1f} GiB" for side, ms in middle.items())
        print(f"{name:12} {title:14} {shown}, {result[title]['times faster']:.2f} times faster", flush=True)
    restore()
    sizes = MODELS[name]
    return {"layers": LAYERS, "training step [B, T]": sizes.train, "prompt [B, T]": sizes.prompt, "times": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each side")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(MODELS):
        parser.error(f"--only must name models of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU, and torch sees none")
    device = torch.cuda.get_device_name()
    with_fla = is_installed()
    content = {
        **describe(), "device": device, "transformers": transformers.__version__, "flash-linear-attention": with_fla,
        "models": {},
    }  # fmt: skip
    path = RESULTS / f"transformers-models{'-and-fla' if with_fla else ''}-{file_suffix(device)}.json"
    for name in chosen:
        content["models"][name] = measure(name, arguments.rounds)
        gc.collect()
        torch.cuda.empty_cache()
        write_json(path, content)


if __name__ == "__main__":
    main()
