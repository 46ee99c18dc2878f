"""Decoding of a whole model in a pool of states, as vLLM calls it, beside the captured step of `generate()`.

    python -m fastweights_studies.measure.serving_decode
    python -m fastweights_studies.measure.serving_decode --preset gdn-340m --batches 64,256 --state-dtype bfloat16

Random weights in bfloat16. Both steps read one token of every sequence and give logits. Each is one CUDA graph; timed in turn. In
the pool every layer finds its states in the rows of the sequences. Rows of padding fill a step up to a multiple of 8, as in the
CUDA graphs of vLLM. The step of `generate()` holds the states of a batch beside each other, so its rate is what the kernels
allow. Checked: whether both write the same tokens. Writes studies/results/serving-decode-<device>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.models import FastWeightsForCausalLM
from fastweights.models.decoding import DecodeSteps
from fastweights.models.presets import preset
from fastweights.serving.vllm.pool import Layout, PooledMixer
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import as_graph, interleaved
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "serving_decode"
PROMPT = 64  # tokens, read in the pool before the first step
COMPARED = 16  # steps whose tokens are compared
REPLAYS = 50
MULTIPLE = 8  # of rows in a step
STATE_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class PooledModel:
    """A model whose `count` sequences have their states in pools, in rows in descending order. Row 0 belongs to padding."""

    def __init__(self, model: Any, count: int, state_dtype: torch.dtype | None = None) -> None:
        self.model, self.count, device = model, count, model.device
        self.rows = torch.arange(count, 0, -1, dtype=torch.int32, device=device)
        self.padding = -count % MULTIPLE
        self.padded = torch.cat([self.rows, self.rows.new_zeros(self.padding)])
        self.pools: list[PooledMixer] = []
        self.bytes = 0  # per sequence
        for block in model.model.layers:
            size = Layout(block.mixer.state_spec(), state_dtype).size
            self.bytes += size
            blocks = torch.zeros(count + 1, size, dtype=torch.uint8, device=device)
            self.pools.append(PooledMixer(block.mixer, blocks, state_dtype))

    def read(self, ids_ND: Tensor, mix: Any) -> Tensor:
        body = self.model.model
        x = body.embed_tokens(ids_ND)
        for block, pool in zip(body.layers, self.pools, strict=True):
            x = x + mix(pool, block.mixer_norm(x))
            if block.mlp is not None:
                x = x + block.mlp(block.mlp_norm(x))
        return self.model.lm_head(body.norm(x))

    def prefill(self, ids_NT: Tensor) -> Tensor:
        """Logits [N, vocabulary] after prompts of one length, read as one packed row."""
        count, time = ids_NT.shape
        edges = torch.arange(count + 1, dtype=torch.int32, device=ids_NT.device) * time
        fresh = torch.zeros(count, dtype=torch.bool, device=ids_NT.device)
        logits = self.read(ids_NT.reshape(-1), lambda pool, x: pool.prefill(x, self.rows, fresh, edges))
        return logits.view(count, time, -1)[:, -1]

    def step(self, ids_N: Tensor) -> Tensor:
        """Logits after one token more; ids_N has padding at its end."""
        return self.read(ids_N, lambda pool, x: pool.decode(x, self.padded))


def same_tokens(pooled: PooledModel, ids_NT: Tensor, steps: int) -> float:
    """The part of greedy tokens that the pool writes as `generate()` does, given the tokens of the latter."""
    model = pooled.model
    wanted = model.generate(
        ids_NT, attention_mask=torch.ones_like(ids_NT), max_new_tokens=steps + 1, do_sample=False, eos_token_id=None
    )[:, ids_NT.shape[1] :]
    written = [pooled.prefill(ids_NT).argmax(-1)]
    for step in range(steps):
        ids_N = torch.cat([wanted[:, step], wanted.new_zeros(pooled.padding)])
        written.append(pooled.step(ids_N)[: pooled.count].argmax(-1))
    return (torch.stack(written, 1) == wanted).float().mean().item()


def capture_step(model: Any, ids_NT: Tensor, repeats: int) -> tuple[DecodeSteps, torch.cuda.CUDAGraph]:
    """The step of `generate()` after these prompts, to be replayed `repeats` times at most: what holds its memory, and its graph.

    Raises:
        SystemExit: the step cannot be captured.
    """
    caches = model(ids_NT, use_cache=True).past_key_values.layers
    fixed = [block.mixer.fixed_cache(cache, repeats) for block, cache in zip(model.model.layers, caches, strict=True)]
    steps = DecodeSteps(model, 1 + repeats)
    steps.begin(ids_NT[:, -1:], fixed)
    if steps.graph is None:
        raise SystemExit("the step of generate() cannot be captured; see the warning above")
    return steps, steps.graph


def measure(model: Any, batch: int, state_dtype: torch.dtype | None, repeats: int) -> dict[str, dict[str, Value]]:
    """Of a step in the pool and of the step of generate()."""
    pooled = PooledModel(model, batch, state_dtype)
    ids_NT = torch.randint(model.config.vocab_size, (batch, PROMPT), device=model.device)
    same = same_tokens(pooled, ids_NT, COMPARED)
    token = torch.zeros(len(pooled.padded), dtype=torch.long, device=model.device)
    _held, graph = capture_step(model, ids_NT, repeats)
    times = interleaved({"pool": as_graph(lambda: pooled.step(token)), "generate": graph.replay}, repeats)
    rates = {name: batch / spread.median * 1e3 for name, spread in times.items()}
    found: dict[str, dict[str, Value]] = {
        name: {"step_ms": spread, "tokens_per_second": rates[name]} for name, spread in times.items()
    }
    found["pool"] |= {"same_tokens": same, "state_bytes": pooled.bytes}
    return found


def make_step_rows(
    preset: str, state_dtype: str, batch: int, found: Mapping[str, Mapping[str, Value]], origin: Origin
) -> list[Row]:
    column: dict[str, Plain] = {"preset": preset, "state_dtype": state_dtype, "batch": batch}
    return [
        row
        for side, values in found.items()
        for row in make_rows(TASK, origin, values, column={**column, "pool": side == "pool"})
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn-340m")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--state-dtype", choices=STATE_DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=REPLAYS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(preset(asked.preset)).bfloat16().eval()
    path, origin = name_file(asked.results, "serving-decode", device), describe(device)
    for batch in map(int, asked.batches.split(",")):
        found = measure(model, batch, STATE_DTYPES[asked.state_dtype], asked.repeats)
        pool, own = found["pool"], found["generate"]
        print(
            f"{asked.preset}, {batch} sequences: {pool['tokens_per_second']:,.0f} tokens/s in the pool, "
            f"{pool['tokens_per_second'] / own['tokens_per_second']:.2f} of the step of generate(); "  # type: ignore[operator]
            f"{pool['same_tokens']:.4f} of the tokens are the same; {pool['state_bytes']:,} bytes per sequence",
            flush=True,
        )
        replace_rows(path, make_step_rows(asked.preset, asked.state_dtype, batch, found, origin))


if __name__ == "__main__":
    main()
