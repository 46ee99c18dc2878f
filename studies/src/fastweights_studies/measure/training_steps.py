"""Time of a training step (forward, backward, optimizer) of whole models, beside the model they are compared with.

Commands, each `python -m fastweights_studies.measure.training_steps` with these options:
    (none)                                    all comparisons below
    --only palimpsa-d-760m "24 layers of gdn, compiled"
    --mixers palimpsa-d,lattice --base gdn --batch 8    24 layers of width 1024
    --compile blocks --replay                 both sides by torch.compile, as CUDA graphs
    --mixers mine --import my_layers.py       a mixer of one's own

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
import dataclasses
import gc
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language.compiling import compile_model
from fastweights.training.language.graphs import GraphedGradients
from fastweights_studies.measure.environment import describe, find_gpu, parse_with_mixers
from fastweights_studies.measure.judge import tuning
from fastweights_studies.measure.judge.peers import is_installed
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.measure.models import FLA, Model, make_step_rows, measured_in_one_comparison
from fastweights_studies.measure.rows import Value, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Row

CACHE = "runs/tokens"  # where `fastweights train` keeps compiled code unless its run says otherwise
WARM = 4  # steps, in which a replayed model is captured


@dataclass(frozen=True)
class Comparison:
    """A model, the model whose step is 1, and sequences per step."""

    model: Model
    base: Model
    batch: int

    def run(self, *, compiled: str | None, replayed: bool) -> Comparison:
        """The comparison with both sides run in this way."""
        way = {"compiled": compiled, "replayed": replayed}
        return Comparison(self.model.run(**way), self.base.run(**way), self.batch)  # type: ignore[arg-type]


GDN = Model(mixer="gdn")
GATED = Model(mixer="gdn", options={"output_gate": "silu"})
PEER = Model(mixer="gdn", library=FLA)
LAYERS_BATCH = 8  # sequences per step, unless --batch says otherwise


def compare_presets(model: str, base: str, batch: int) -> Comparison:
    return Comparison(Model(preset=model), Model(preset=base), batch)


def compare_changed(base: str, batch: int, **options: int | str) -> Comparison:
    """A preset with other layers of Gated KalmaNet beside the preset as it is."""
    return Comparison(Model(preset=base, options=options), Model(preset=base), batch)


def compare_gated(ours: tuple[str | None, bool], theirs: tuple[str | None, bool]) -> Comparison:
    """Our gated delta rule beside that of flash-linear-attention, each compiled and replayed as its pair says."""
    return Comparison(
        GATED.run(compiled=ours[0], replayed=ours[1]), PEER.run(compiled=theirs[0], replayed=theirs[1]), LAYERS_BATCH
    )


HYBRID = Model(preset="gka-hybrid-2.8b", options={"memory": "gdn"})
COMPARISONS = (
    compare_presets("palimpsa-d-760m", "palimpsa-d-plain-760m", 8),
    compare_presets("palimpsa-d-170m", "palimpsa-d-plain-170m", 16),
    compare_presets("palimpsa-m-760m", "mamba2-760m-palimpsa", 8),
    compare_presets("lattice-encode-110m", "gdn-110m-lattice", 16),
    compare_presets("lattice-similarity-110m", "gdn-110m-lattice", 16),
    compare_presets("lattice-110m", "gdn-110m-lattice", 32),
    *(
        Comparison(Model(mixer=mixer, options=options), Model(mixer=base), LAYERS_BATCH)
        for mixer, options, base in (
            ("palimpsa-d", {}, "gdn"),
            ("pgdn", {}, "gdn"),
            ("kda", {}, "gdn"),
            ("pkda", {}, "kda"),
            ("gka", {}, "gdn"),
            ("vla", {}, "gdn"),
            ("rls", {}, "gdn"),
            ("lattice", {"objective": "encode"}, "gdn"),
            # By themselves these have an output gate, which gdn has not: its product and norm are no part of the rule.
            ("palimpsa-d", {"output_gate": None}, "gdn"),
            ("gka", {"output_gate": None}, "gdn"),
            ("lattice", {"objective": "encode", "output_gate": None}, "gdn"),
        )
    ),
    Comparison(GDN.run(compiled="whole", replayed=False), GDN, LAYERS_BATCH),
    Comparison(GDN.run(compiled="blocks", replayed=False), GDN, LAYERS_BATCH),
    Comparison(GDN.run(compiled=None, replayed=True), GDN, LAYERS_BATCH),
    Comparison(GDN.run(compiled="blocks", replayed=True), GDN.run(compiled=None, replayed=True), LAYERS_BATCH),
    # Rows of its matrices do not begin at multiples of 16 bytes; the default width is 2,752.
    Comparison(dataclasses.replace(GDN, mlp=2751, replayed=True), GDN.run(compiled=None, replayed=True), LAYERS_BATCH),
    Comparison(
        dataclasses.replace(GDN, mlp=2751, compiled="blocks", replayed=True),
        GDN.run(compiled="blocks", replayed=True),
        LAYERS_BATCH,
    ),
    compare_gated((None, False), (None, False)),
    compare_gated(("blocks", False), ("whole", False)),
    compare_gated(("blocks", True), ("whole", True)),
    compare_presets("pgdn-340m", "gdn-340m", 16),
    compare_presets("pkda-340m", "kda-340m", 16),
    compare_changed("gka-1b", 4, sketch=32),
    compare_presets("gka-440m", "gdn-440m-gka", 8),
    Comparison(Model(preset="gka-440m", options={"iterations": 20}), Model(preset="gdn-440m-gka"), 8),
    Comparison(Model(preset="gka-hybrid-2.8b"), HYBRID, 2),
    Comparison(Model(preset="gka-hybrid-2.8b", options={"iterations": 20}), HYBRID, 2),
)


def peer_model(of_size: FastWeightsConfig) -> nn.Module:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=of_size.hidden_size, num_hidden_layers=of_size.num_hidden_layers, num_heads=of_size.num_heads,
            head_dim=of_size.hidden_size // of_size.num_heads, expand_v=1.0, intermediate_size=of_size.intermediate_size,
            vocab_size=of_size.vocab_size,
        )
    )  # fmt: skip


def build(asked: Model) -> tuple[nn.Module, int]:
    """The model, and how many tokens it knows. What is to be compiled is when it is first called."""
    if asked.library == FLA:
        config = GATED.configuration()
        model = peer_model(config)
        if asked.compiled:
            model.compile()
    else:
        config = asked.configuration()
        model = FastWeightsForCausalLM(config)
        compile_model(model, asked.compiled == "whole" or asked.compiled or False, CACHE)
    return model, config.vocab_size


class Trained:
    """A model that takes training steps on random tokens."""

    def __init__(self, asked: Model, batch: int, length: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):  # on the CPU first values of a large model take half a minute
            model, vocabulary = build(asked)
        self.model = model.train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(vocabulary, (batch, length), device="cuda")
        self.times: list[float] = []
        self.gradients = GraphedGradients(list(self.model.parameters()), self.forward_and_backward, required=True)
        self.gradients.possible = asked.replayed
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.loss = self.step().item()
        self.first_step = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self.step()
        self.memory = torch.cuda.max_memory_allocated() - held
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

    def values(self) -> dict[str, Value]:
        spread = Milliseconds.of(self.times)
        return {
            "step_ms": spread,
            "tokens_per_second": self.tokens.numel() / spread.median * 1e3,
            "activations_bytes": self.memory,
            "first_step_s": self.first_step,
            "first_loss": self.loss,
            "parameters": self.parameters,
        }


Kept = dict[str, tuple[tuple[Model, int, int], Trained]]  # at most one base: what it was asked for, and the model


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def base_of(comparison: Comparison, length: int, kept: Kept) -> Trained:
    """The base of the comparison before, where this one has the same, without the times of its steps; else a new one."""
    asked = (comparison.base, comparison.batch, length)
    if "base" not in kept or kept["base"][0] != asked:
        kept.clear()
        free_memory()  # before the next is built: both may not fit
        kept["base"] = asked, Trained(*asked)
    _, base = kept["base"]
    base.times.clear()
    return base


def compare(comparison: Comparison, length: int, rounds: int, kept: Kept) -> list[tuple[Model, dict[str, Value]]]:
    """What was measured of the base and of the model beside it; of a model that is its own base once."""
    sides = [(comparison.base, base_of(comparison, length, kept))]
    if comparison.model != comparison.base:
        sides.append((comparison.model, Trained(comparison.model, comparison.batch, length)))
    for _, trained in sides:
        trained.step()  # compiles a base again that is not replayed: compile_model() has forgotten it
    for _ in range(rounds):
        for _, trained in sides:
            trained.timed_step()
    return [(model, trained.values()) for model, trained in sides]


def choose(arguments: argparse.Namespace) -> list[Comparison]:
    if arguments.mixers:
        base, batch = Model(mixer=arguments.base), arguments.batch or LAYERS_BATCH
        return [Comparison(Model(mixer=mixer), base, batch) for mixer in arguments.mixers.split(",")]
    known = {one.model.title: one for one in COMPARISONS}
    with_peer = [title for title, one in known.items() if one.base.library == FLA]
    wanted = arguments.only or [title for title in known if title not in with_peer or is_installed()]
    unknown = [title for title in wanted if title not in known]
    if unknown:
        raise SystemExit(f"--only must name comparisons, of {', '.join(known)}; got {', '.join(unknown)}")
    if not is_installed() and set(wanted) & set(with_peer):
        raise SystemExit("--only names a comparison with flash-linear-attention, which is not installed")
    found = [known[title] for title in wanted]
    return [dataclasses.replace(one, batch=arguments.batch) for one in found] if arguments.batch else found


def show(measured: list[tuple[Model, dict[str, Value]]]) -> None:
    times = []
    for model, values in measured:
        step = values["step_ms"]
        assert isinstance(step, Milliseconds)
        times.append(step.median)
        print(
            f"{model.title:38} {step.median:8.1f} ms  {values['tokens_per_second'] / 1e3:6.1f} k tokens/s  "  # type: ignore[operator]
            f"{values['activations_bytes'] / 2**30:5.1f} GiB  first step {values['first_step_s']:.1f} s"  # type: ignore[operator]
        )
    model, base = measured[-1][0], measured[0][0]
    print(f"{model.title}: {times[-1] / times[0]:.2f} of the step of {base.title}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="comparisons, of " + ", ".join(one.model.title for one in COMPARISONS)
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
    comparisons = choose(arguments)
    if arguments.compile or arguments.replay:
        comparisons = [one.run(compiled=arguments.compile, replayed=arguments.replay) for one in comparisons]
    device = find_gpu()
    path = name_file(arguments.results, "training-steps", device)
    with_peer = any(one.base.library == FLA for one in comparisons)
    if with_peer:
        tuning.load_choices(tuning.choices_file(RESULTS, device))
        tuning.time_shortly()
    rows: list[Row] = []
    failed = []
    kept: Kept = {}
    for comparison in comparisons:
        try:
            measured = compare(comparison, arguments.length, arguments.rounds, kept)
        except Exception as error:  # the other comparisons are worth measuring
            failed.append(f"{comparison.model.title}: {type(error).__name__}: {error}")
            traceback.print_exc()
            kept.clear()  # the error may have come in the middle of a step of the base
        else:
            show(measured)
            origin, size = describe(device), (comparison.batch, arguments.length)
            rows += [
                row
                for model, values in measured
                for row in make_step_rows(comparison.model, model, *size, origin, values)
            ]
            replace_rows(path, rows, measured_in_one_comparison)  # all: another process may have lost the earlier ones
        free_memory()  # out of the except clause, whose error keeps the tensors of the frames that it passed
        if with_peer:
            tuning.save_choices(tuning.choices_file(arguments.results, device))
    if failed:
        raise SystemExit("\n".join(["not measured:", *failed]))


if __name__ == "__main__":
    main()
