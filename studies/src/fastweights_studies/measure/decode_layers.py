"""Decoding by a whole memory layer: one token for each of many sequences, beside a layer with another memory.

    python -m fastweights_studies.measure.decode_layers
    python -m fastweights_studies.measure.decode_layers --mixer lattice --base gdn --widths 512,1024,2048 --batch 64
    python -m fastweights_studies.measure.decode_layers --mixer 'gdn in a pool' --base gdn --widths 1024 --batch 256  states as in vLLM

Projections, convolutions, memory, norm and gate of one layer in bfloat16, heads of 128 channels, without gradients. Device time,
of a replayed CUDA graph, both layers in turn. Writes studies/results/decode-layers-<device>.json, which keeps the pairs of
layers that are not run again.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

from fastweights.layers import LayerCache, build_mixer, parse_mixers
from fastweights.serving.vllm.pool import Layout, PooledMixer
from fastweights_studies.measure.environment import describe, kept_rows, write_json
from fastweights_studies.measure.judge.timing import Work, as_graph, interleaved
from fastweights_studies.places import RESULTS

HEAD = 128
PREFIX = 64  # tokens before the timed one
IN_POOL = " in a pool"


def one_token(mixer: str, width: int, batch: int) -> tuple[Work, int]:
    """A captured step of the layer, and the numbers of its state per sequence."""
    torch.manual_seed(0)
    (choice,) = parse_mixers(mixer.removesuffix(IN_POOL))
    layer = build_mixer(choice.name, hidden_size=width, num_heads=width // HEAD, **choice.options).to(
        "cuda", torch.bfloat16
    )
    if mixer.endswith(IN_POOL):
        size, rows = Layout(layer.state_spec()).size, torch.randperm(batch, device="cuda", dtype=torch.int32) + 1
        pooled = PooledMixer(layer, torch.zeros(batch + 1, size, dtype=torch.uint8, device="cuda"))
        x_ND = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
        return as_graph(lambda: pooled.decode(x_ND, rows)), layer.state_size()
    before = LayerCache()
    x = torch.randn(batch, PREFIX + 1, width, device="cuda", dtype=torch.bfloat16)
    layer(x[:, :PREFIX], before)
    token = x[:, PREFIX:].contiguous()
    return as_graph(lambda: layer(token, copy.copy(before))), layer.state_size()


@torch.no_grad()
def measure(mixer: str, base: str, width: int, batch: int, repeats: int) -> dict[str, Any]:
    steps = {name: one_token(name, width, batch) for name in (mixer, base)}
    times = interleaved({name: step for name, (step, _) in steps.items()}, repeats)
    found = {
        name: {"ms": list(spread), "tokens/s": batch / spread.median * 1e3, "state": steps[name][1]}
        for name, spread in times.items()
    }
    return {"layers": found, "tokens/s of the base": times[base].median / times[mixer].median}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", default="palimpsa-d")
    parser.add_argument(
        "--base", default="palimpsa-d:metaplasticity=false", help="the default is simple GLA in the same layer"
    )
    parser.add_argument("--widths", default="512,1024,2048")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    path, device, pairs = kept_rows(arguments.results, "decode-layers", "pairs")
    rows = {}
    for width in map(int, arguments.widths.split(",")):
        row = rows[f"width {width}"] = measure(
            arguments.mixer, arguments.base, width, arguments.batch, arguments.repeats
        )
        times = ", ".join(f"{name} {found['ms'][0] * 1e3:.1f} us" for name, found in row["layers"].items())
        print(f"width {width}: {times}; {row['tokens/s of the base']:.2f} of the base's tokens per second", flush=True)
    pairs[f"{arguments.mixer} beside {arguments.base}, {arguments.batch} sequences"] = {**rows, "measured": describe()}
    write_json(path, {**describe(), "device": device, "pairs": pairs})


if __name__ == "__main__":
    main()
