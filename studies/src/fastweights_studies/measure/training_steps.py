"""Time of a training step (forward, backward, optimizer) of whole models, beside the model they are compared with.

    python -m fastweights_studies.measure.training_steps                                      all comparisons below
    python -m fastweights_studies.measure.training_steps --only palimpsa-d-760m "24 layers of gdn, compiled"
    python -m fastweights_studies.measure.training_steps --mixers palimpsa-d,lattice --base gdn --batch 8  24 layers of width 1024
    python -m fastweights_studies.measure.training_steps --compile blocks --replay            both sides by torch.compile, as CUDA graphs
    python -m fastweights_studies.measure.training_steps --mixers mine --import my_layers.py  a mixer of one's own

A name with ", compiled" or ", compiled by blocks" is that model by torch.compile, as in "24 layers of gdn, compiled". With ",
replayed" its forward and backward are a CUDA graph, as `fastweights train` takes them on one GPU; where they cannot
be captured, the model is not measured.

Presets, or with --mixers the default configuration (24 layers, width 1024, 8 heads of 128) with each mixer. Random tokens,
bfloat16 autocast, fused AdamW, the loss in pieces: what `fastweights train` does in a step. All models of a comparison lie on the
GPU at once and take their steps in turn, so that a change of clocks meets all. The base stays for the next comparison where it is
the same, and is timed again with each. A model that is its own base is measured alone.

Writes studies/results/training-steps-<device>.json after every comparison, and keeps those that are not run again, also those
that another process has written meanwhile: two may share the work on two GPUs. A comparison that fails costs no other, and is
named at the end.

"24 layers of flash-linear-attention's gdn" is its GatedDeltaNetForCausalLM with values as wide as keys. It is left out where that
package is not installed. Its first step times many variants of its kernels, which takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, preset
from fastweights.training.language.compiling import compile_model
from fastweights.training.language.graphs import GraphedGradients
from fastweights_studies.measure.environment import (
    describe,
    file_suffix,
    kept_rows,
    parse_with_mixers,
    rows_in,
    write_json,
)
from fastweights_studies.measure.judge import tuning
from fastweights_studies.measure.judge.peers import is_installed
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.places import RESULTS

CACHE = "runs/tokens"  # where `fastweights train` keeps compiled code unless its run says otherwise
WARM = 4  # steps, in which a replayed model is captured


class Comparison(NamedTuple):
    """A model, the model whose step is 1, and sequences per step."""

    model: str
    base: str
    batch: int


COMPARISONS = (
    Comparison("palimpsa-d-760m", "palimpsa-d-plain-760m", 8),
    Comparison("palimpsa-d-170m", "palimpsa-d-plain-170m", 16),
    Comparison("palimpsa-m-760m", "mamba2-760m-palimpsa", 8),
    Comparison("lattice-encode-110m", "gdn-110m-lattice", 16),
    Comparison("lattice-similarity-110m", "gdn-110m-lattice", 16),
    Comparison("lattice-110m", "gdn-110m-lattice", 32),
    *(
        Comparison(f"24 layers of {model}", f"24 layers of {base}", 8)
        for model, base in {
            "palimpsa-d": "gdn",
            "pgdn": "gdn",
            "kda": "gdn",
            "pkda": "kda",
            "gka": "gdn",
            "vla": "gdn",
            "rls": "gdn",
            "lattice-encode": "gdn",
        }.items()
    ),
    Comparison("24 layers of gdn, compiled", "24 layers of gdn", 8),
    Comparison("24 layers of gdn, compiled by blocks", "24 layers of gdn", 8),
    Comparison("24 layers of gdn, replayed", "24 layers of gdn", 8),
    Comparison("24 layers of gdn, compiled by blocks, replayed", "24 layers of gdn, replayed", 8),
    Comparison("24 layers of gated gdn", "24 layers of flash-linear-attention's gdn", 8),
    Comparison("24 layers of gated gdn, compiled by blocks", "24 layers of flash-linear-attention's gdn, compiled", 8),
    Comparison(
        "24 layers of gated gdn, compiled by blocks, replayed",
        "24 layers of flash-linear-attention's gdn, compiled, replayed",
        8,
    ),
    Comparison("pgdn-340m", "gdn-340m", 16),
    Comparison("pkda-340m", "kda-340m", 16),
    Comparison("gka-1b with sketch 32", "gka-1b", 4),
    Comparison("gka-440m", "gdn-440m-gka", 8),
    Comparison("gka-440m with 20 iterations", "gdn-440m-gka", 8),
    Comparison("gka-hybrid-2.8b", "gka-hybrid-2.8b with gdn", 2),
    Comparison("gka-hybrid-2.8b with 20 iterations", "gka-hybrid-2.8b with gdn", 2),
)
LAYERS = "24 layers of "
LAYERS_BATCH = 8  # sequences per step, unless --batch says otherwise
PEER = LAYERS + "flash-linear-attention's gdn"
SAME_AS_PEER = LAYERS + "gated gdn"
OTHER_NAMES: dict[str, tuple[str, dict[str, Any]]] = {  # mixers of `LAYERS` that are no registry names
    "gated gdn": ("gdn", {"output_gate": "silu"}),
    "lattice-encode": ("lattice", {"objective": "encode"}),
}
COMPILED: dict[str, bool | str] = {"compiled": True, "compiled by blocks": "blocks"}
REPLAYED = "replayed"


def compiled(name: str) -> bool | str:
    """What torch.compile compiles of the model of this name."""
    return next((COMPILED[way] for way in name.split(", ")[1:] if way in COMPILED), False)


def configuration(name: str) -> FastWeightsConfig:
    """Of a preset, of `LAYERS` and a mixer, or of a preset whose layers of Gated KalmaNet have another number of iterations, a
    sketch, or are gated delta rules."""
    name = name.split(", ")[0]
    if name.startswith(LAYERS):
        mixer, options = OTHER_NAMES.get(name.removeprefix(LAYERS), (name.removeprefix(LAYERS), {}))
        return FastWeightsConfig(mixer={"name": mixer, **options})
    known, _, change = name.partition(" with ")
    if not change:
        return preset(known)
    options = (
        {"sketch": change[7:]} if change.startswith("sketch ") else {"iterations": change.removesuffix(" iterations")}
    )

    def changed(mixer: str, before: dict[str, Any]) -> dict[str, Any]:
        if mixer != "gka":
            return {"name": mixer, **before}
        if change == "gdn":
            return {"name": "gdn", "output_gate": "silu", "conv_init": before["conv_init"]}
        return {"name": mixer, **before, **{name: int(value) for name, value in options.items()}}

    return preset(known, mixer=[changed(*layer) for layer in preset(known).mixers()])


def peer_model(of_size: FastWeightsConfig) -> nn.Module:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=of_size.hidden_size, num_hidden_layers=of_size.num_hidden_layers, num_heads=of_size.num_heads,
            head_dim=of_size.hidden_size // of_size.num_heads, expand_v=1.0, intermediate_size=of_size.intermediate_size,
            vocab_size=of_size.vocab_size,
        )
    )  # fmt: skip


def build(name: str) -> tuple[nn.Module, int]:
    """The model, and how many tokens it knows. What is to be compiled is when it is first called."""
    if name.startswith(PEER):
        config = configuration(SAME_AS_PEER)
        model = peer_model(config)
        if compiled(name):
            model.compile()
    else:
        config = configuration(name)
        model = FastWeightsForCausalLM(config)
        compile_model(model, compiled(name), CACHE)
    return model, config.vocab_size


class Trained:
    """A model that takes training steps on random tokens."""

    def __init__(self, name: str, batch: int, length: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):  # on the CPU first values of a large model take half a minute
            model, vocabulary = build(name)
        self.model = model.train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(vocabulary, (batch, length), device="cuda")
        self.times: list[float] = []
        self.gradients = GraphedGradients(list(self.model.parameters()), self.forward_and_backward, required=True)
        self.gradients.possible = REPLAYED in name.split(", ")
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.loss = self.step().item()
        self.first_step = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self.step()
        self.memory = (torch.cuda.max_memory_allocated() - held) / 2**30
        for _ in range(WARM):
            self.step()

    def forward_and_backward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(**inputs).loss
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        loss = self.gradients({"input_ids": self.tokens, "labels": self.tokens})
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def timed_step(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.step()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end))

    def row(self) -> dict[str, Any]:
        spread = Milliseconds.of(self.times)
        return {
            "parameters": self.parameters, "step, ms": list(spread), "tokens/s": self.tokens.numel() / spread.median * 1e3,
            "activations, GiB": self.memory, "first step, s": self.first_step,
            "first loss": self.loss if math.isfinite(self.loss) else None,  # JSON has no NaN
        }  # fmt: skip


Kept = dict[tuple[str, int, int], Trained]  # at most one, by name, batch and length


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def base_of(comparison: Comparison, length: int, kept: Kept) -> Trained:
    """The base of the comparison before, where this one has the same, without the times of its steps; else a new one."""
    asked = (comparison.base, comparison.batch, length)
    if asked not in kept:
        kept.clear()
        free_memory()  # before the next is built: both may not fit
        kept[asked] = Trained(*asked)
    kept[asked].times.clear()
    return kept[asked]


def compare(comparison: Comparison, length: int, rounds: int, kept: Kept) -> dict[str, Any]:
    names = (comparison.base, comparison.model)
    trained = {comparison.base: base_of(comparison, length, kept)}
    if comparison.model not in trained:
        trained[comparison.model] = Trained(comparison.model, comparison.batch, length)
    for one in trained.values():
        one.step()  # compiles a base again that is not replayed: compile_model() has forgotten it
    for _ in range(rounds):
        for one in trained.values():
            one.timed_step()
    rows = {name: one.row() for name, one in trained.items()}
    base, model = (rows[name] for name in names)
    return {
        "batch": comparison.batch, "length": length, "models": rows,
        "step of the base": model["step, ms"][0] / base["step, ms"][0],
    }  # fmt: skip


def chosen(arguments: argparse.Namespace) -> list[Comparison]:
    if arguments.mixers:
        base = LAYERS + arguments.base
        return [
            Comparison(LAYERS + mixer, base, arguments.batch or LAYERS_BATCH) for mixer in arguments.mixers.split(",")
        ]
    known = {one.model: one for one in COMPARISONS}
    with_peer = [name for name, one in known.items() if one.base.startswith(PEER)]
    wanted = arguments.only or [name for name in known if name not in with_peer or is_installed()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"--only must name comparisons, of {', '.join(known)}; got {', '.join(unknown)}")
    if not is_installed() and set(wanted) & set(with_peer):
        raise SystemExit("--only names a comparison with flash-linear-attention, which is not installed")
    found = [known[name] for name in wanted]
    return [one._replace(batch=arguments.batch) for one in found] if arguments.batch else found


def both(comparison: Comparison, what: str | None, replayed: bool) -> Comparison:
    """The comparison with both sides compiled, as CUDA graphs, or both."""
    ending = {None: "", "whole": ", compiled", "blocks": ", compiled by blocks"}[what]
    ending += f", {REPLAYED}" if replayed else ""
    return comparison._replace(model=comparison.model + ending, base=comparison.base + ending)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="comparisons, of " + ", ".join(one.model for one in COMPARISONS)
    )
    parser.add_argument("--mixers", help="compare these in the default configuration instead")
    parser.add_argument("--base", default="gdn", help="with --mixers: the mixer whose step is 1")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--compile", choices=("whole", "blocks"), help="both models of every comparison by torch.compile"
    )
    parser.add_argument("--replay", action="store_true", help="both models of every comparison as CUDA graphs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parse_with_mixers(parser)
    tuning.keep_choices()
    comparisons = [both(one, arguments.compile, arguments.replay) for one in chosen(arguments)]
    path, device, _ = kept_rows(arguments.results, "training-steps", "comparisons")
    with_peer = any(one.base.startswith(PEER) for one in comparisons)
    choices = f"peer-tuning-{file_suffix(device)}.json"
    if with_peer:
        tuning.load_choices(RESULTS / choices)
        tuning.time_shortly()
    measured: dict[str, Any] = {}
    failed = []
    kept: Kept = {}
    for comparison in comparisons:
        try:
            row = {**compare(comparison, arguments.length, arguments.rounds, kept), "measured": describe()}
        except Exception as error:  # the other comparisons are worth measuring
            failed.append(f"{comparison.model}: {type(error).__name__}: {error}")
            traceback.print_exc()
            kept.clear()  # the error may have come in the middle of a step of the base
        else:
            measured[comparison.model] = row
            for name, model in row["models"].items():
                print(
                    f"{name:38} {model['step, ms'][0]:8.1f} ms  {model['tokens/s'] / 1e3:6.1f} k tokens/s  "
                    f"{model['activations, GiB']:5.1f} GiB  first step {model['first step, s']:.1f} s"
                )
            print(f"{comparison.model}: {row['step of the base']:.2f} of the step of {comparison.base}", flush=True)
            rows = {**rows_in(path, "comparisons"), **measured}
            write_json(path, {**describe(), "device": device, "comparisons": rows})
        free_memory()  # out of the except clause, whose error keeps the tensors of the frames that it passed
        if with_peer:
            tuning.save_choices(arguments.results / choices)
    if failed:
        raise SystemExit("\n".join(["not measured:", *failed]))


if __name__ == "__main__":
    main()
