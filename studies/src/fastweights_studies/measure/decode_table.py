"""Tokens per second of decoding with every memory of the registry, beside softmax attention whose context grows.

Commands, each `python -m fastweights_studies.measure.decode_table` with these options:
    --compile                               compile the kernels of all rows, many processes at a time
    (none)                                  time the rows that the result file lacks
    --mixers gdn,softmax --batches 1,64 --again
    --mixers mine --import my_layers.py     a mixer of one's own

24 layers of width 1024, 8 heads of 128, bfloat16, random weights. Timed is the captured step of `generate()` alone, by CUDA
events over replays, after as many steps with random tokens as fill a memory. The context of softmax attention is slots full of
zeros, which take as long to read as any others. Writes studies/results/decode-table-<device>.json after every row, so a run
that was stopped continues where it ended; --again measures rows that are there.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fastweights.layers import MIXERS, LayerCache, build_mixer
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.decoding import DecodeSteps
from fastweights_studies.measure.environment import describe, find_gpu, parse_with_mixers
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.measure.rows import Value, find_rows, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS

TASK = "decode_table"
LAYERS = 24
BATCHES = (1, 8, 64)
CONTEXTS = (2048, 16384, 131072)  # of softmax attention
GROWING = ("softmax", "vla-softmax")  # mixers whose state grows
FILL = 160  # tokens, more than a head has channels
REPLAYS = 30
AT_ONCE = 16  # processes that compile


def caches_of(model: FastWeightsForCausalLM, batch: int, context: int | None) -> list[LayerCache]:
    """Fixed caches of every layer: after one token, or with a context for one token more."""
    config, mixers = model.config, [block.mixer for block in model.model.layers]
    if context is None:
        ids = torch.randint(config.vocab_size, (batch, 1), device="cuda")
        layers = model(ids, use_cache=True).past_key_values.layers
        return [mixer.fixed_cache(layer, REPLAYS) for mixer, layer in zip(mixers, layers, strict=True)]
    slots = (batch, context, config.num_heads, config.hidden_size // config.num_heads)
    last = torch.full((batch,), context - 1, device="cuda")
    return [
        LayerCache(
            {name: torch.zeros(slots, device="cuda", dtype=torch.bfloat16) for name in ("keys", "values")},
            {"seen": last.clone(), "place": last.clone()},
            fixed=True,
        )
        for _ in mixers
    ]


def captured(model: FastWeightsForCausalLM, layers: list[LayerCache], batch: int) -> DecodeSteps:
    steps = DecodeSteps(model, 1 + REPLAYS)
    steps.begin(torch.randint(model.config.vocab_size, (batch, 1), device="cuda"), layers)
    if steps.graph is None:
        raise SystemExit("the step cannot be captured; see the warning above")
    return steps


def measure(model: FastWeightsForCausalLM, batch: int, context: int | None) -> dict[str, Value]:
    """Of one column. The state counts what a sequence's memories hold."""
    layers = caches_of(model, batch, context)
    state = sum(x.numel() * x.element_size() for layer in layers for x in layer.memory.values()) // batch
    steps = captured(model, layers, batch)
    assert steps.graph is not None
    for _ in range(FILL if context is None else 3):
        steps.ids.random_(model.config.vocab_size)
        steps.graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events[:-1]:
        event.record()
        steps.graph.replay()
    events[-1].record()
    events[-1].synchronize()
    spread = Milliseconds.of([a.elapsed_time(b) for a, b in zip(events, events[1:])])
    return {"step_ms": spread, "tokens_per_second": batch / spread.median * 1e3, "state_bytes": state}


@torch.no_grad()
def built(mixer: str, layers: int = LAYERS) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, num_hidden_layers=layers))
    return model.bfloat16().eval()


def wanted(mixer: str, batches: list[int]) -> list[tuple[int, int | None]]:
    return [(batch, context) for batch in batches for context in (CONTEXTS if mixer in GROWING else (None,))]


def check_constant(mixer: str) -> None:
    """Refuses a mixer whose speed depends on a context that this script does not know how to fill."""
    with torch.device("meta"):
        layer = build_mixer(mixer, hidden_size=16, num_heads=2)
    if mixer not in GROWING and layer.state_size(1) != layer.state_size(2):
        raise SystemExit(
            f"--mixers names {mixer}, whose state grows; of such mixers only {', '.join(GROWING)} are timed"
        )


def fits(mixer: str, batch: int, context: int | None) -> bool:
    """Whether keys and values of the context have room beside the model."""
    if context is None:
        return True
    free, _ = torch.cuda.mem_get_info()
    return LAYERS * 2 * 2 * batch * context * FastWeightsConfig().hidden_size < free - 4 * 2**30


@torch.no_grad()
def compile_one(mixer: str, batches: list[int]) -> None:
    """Every kernel of the mixer's rows, by a model of one layer and short contexts."""
    model = built(mixer, 1)
    for batch, context in wanted(mixer, batches):
        if context in (None, CONTEXTS[0]):
            captured(model, caches_of(model, batch, context), batch)


def compile_all(mixers: list[str], batches: list[int], imports: list[str]) -> None:
    options = ["--batches", ",".join(map(str, batches)), *(f"--import={module}" for module in imports)]

    def run(mixer: str) -> None:
        subprocess.run([sys.executable, __file__, "--compile", "--mixers", mixer, *options], check=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, mixers))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--again", action="store_true", help="measure rows that the result file has")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parse_with_mixers(parser)
    mixers, batches = arguments.mixers.split(","), [int(batch) for batch in arguments.batches.split(",")]
    for mixer in mixers:
        check_constant(mixer)
    if arguments.compile:
        if len(mixers) == 1:
            compile_one(mixers[0], batches)
        else:
            compile_all(mixers, batches, arguments.imports)
        return
    device = find_gpu()
    path, origin = name_file(arguments.results, "decode-table", device), describe(device)
    there = {(row.mixer, row.column["batch"], row.column["context"]) for row in find_rows(path)}
    for mixer in mixers:
        missing = [one for one in wanted(mixer, batches) if arguments.again or (mixer, *one) not in there]
        model = built(mixer) if missing else None
        for batch, context in missing:
            assert model is not None
            found = measure(model, batch, context) if fits(mixer, batch, context) else {"fits": False}
            column = {"batch": batch, "context": context, "layers": LAYERS}
            replace_rows(path, make_rows(TASK, origin, found, mixer=mixer, column=column))
            print(f"{mixer}, batch {batch}, context {context}: {found.get('step_ms', 'does not fit')}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
