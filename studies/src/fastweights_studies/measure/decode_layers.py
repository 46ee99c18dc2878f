"""Decoding by a whole memory layer: one token for each of many sequences, beside a layer with another memory.

    python -m fastweights_studies.measure.decode_layers
    python -m fastweights_studies.measure.decode_layers --mixer lattice --base gdn --widths 512,1024,2048 --batch 64
    python -m fastweights_studies.measure.decode_layers --mixer gdn --pool --base gdn --widths 1024 --batch 256

With --pool the states of --mixer lie in a pool, as in vLLM.

Projections, convolutions, memory, norm and gate of one layer in bfloat16, heads of 128 channels, without gradients. Device time,
of a replayed CUDA graph, both layers in turn. Writes studies/results/decode-layers-<device>.json, which keeps the pairs of
layers that are not run again.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Hashable
from pathlib import Path

import torch

from fastweights.layers import LayerCache, MixerChoice, build_mixer, parse_mixers
from fastweights.serving.vllm.pool import Layout, PooledMixer
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import Milliseconds, Work, as_graph, interleaved
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "decode_layer"
HEAD = 128
PREFIX = 64  # tokens before the timed one


def one_token(choice: MixerChoice, pool: bool, width: int, batch: int) -> tuple[Work, int]:
    """A captured step of the layer, and the numbers of its state per sequence."""
    torch.manual_seed(0)
    layer = build_mixer(choice.name, hidden_size=width, num_heads=width // HEAD, **choice.options).to(
        "cuda", torch.bfloat16
    )
    if pool:
        size, rows = Layout(layer.state_spec()).size, torch.randperm(batch, device="cuda", dtype=torch.int32) + 1
        pooled = PooledMixer(layer, torch.zeros(batch + 1, size, dtype=torch.uint8, device="cuda"))
        x_ND = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
        return as_graph(lambda: pooled.decode(x_ND, rows)), layer.state_size()
    before = LayerCache()
    x = torch.randn(batch, PREFIX + 1, width, device="cuda", dtype=torch.bfloat16)
    layer(x[:, :PREFIX], before)
    token = x[:, PREFIX:].contiguous()
    return as_graph(lambda: layer(token, copy.copy(before))), layer.state_size()


def name_pair(choice: MixerChoice, pool: bool, base: MixerChoice) -> str:
    """A name without spaces, which no other pair of layers has."""
    return f"{choice.label}{'@pool' * pool}/{base.label}"


def make_layer_rows(
    choice: MixerChoice, pool: bool, pair: str, side: str, width: int, batch: int, found: tuple[Milliseconds, int], origin: Origin
) -> list[Row]:  # fmt: skip
    """The rows of a layer, of the side "layer" or "base" of a pair."""
    spread, state = found
    return make_rows(
        TASK,
        origin,
        {"step_ms": spread, "tokens_per_second": batch / spread.median * 1e3, "state_size": state},
        mixer=choice.name,
        options=choice.options,
        column={"width": width, "batch": batch, "pool": pool},
        run={"pair": pair, "side": side},
    )


def measured_in_one_pair(row: Row) -> Hashable:
    return row.task, row.run["pair"], row.column["width"], row.column["batch"]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", default="palimpsa-d")
    parser.add_argument("--pool", action="store_true", help="the states of --mixer in a pool, as in vLLM")
    parser.add_argument(
        "--base", default="palimpsa-d:metaplasticity=false", help="the default is simple GLA in the same layer"
    )
    parser.add_argument("--widths", default="512,1024,2048")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    (choice,), (base,) = parse_mixers(asked.mixer), parse_mixers(asked.base)
    pair, device = name_pair(choice, asked.pool, base), find_gpu()
    path, origin = name_file(asked.results, "decode-layers", device), describe(device)
    for width in map(int, asked.widths.split(",")):
        sides = {"layer": (choice, asked.pool), "base": (base, False)}
        steps = {side: one_token(*layer, width, asked.batch) for side, layer in sides.items()}
        times = interleaved({side: step for side, (step, _) in steps.items()}, asked.repeats)
        rows = [
            row
            for side, layer in sides.items()
            for row in make_layer_rows(*layer, pair, side, width, asked.batch, (times[side], steps[side][1]), origin)
        ]
        replace_rows(path, rows, measured_in_one_pair)
        shown = ", ".join(f"{side} {spread.median * 1e3:.1f} us" for side, spread in times.items())
        share = times["base"].median / times["layer"].median
        print(f"{pair}, width {width}: {shown}; {share:.2f} of the base's tokens per second", flush=True)


if __name__ == "__main__":
    main()
