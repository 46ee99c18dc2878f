"""Writes the generated parts of README.md and of pages in docs from the registries of mixers and tasks and studies/results.

python -m fastweights_studies.pages.page_parts
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights.data import TASKS
from fastweights.layers import MIXERS, build_mixer, probe
from fastweights.results import RecallSummary, load_results, summarize
from fastweights_studies.leaderboard.sizes import own_mixers
from fastweights_studies.measure import ops_cpu
from fastweights_studies.measure.models import FLA, Model, Step, read_steps
from fastweights_studies.pages import block_effects, linearization, scaling
from fastweights_studies.pages.evidence import recall_defaults, speed
from fastweights_studies.pages.rendering import Page, list_item, replace_part, share, table
from fastweights_studies.pages.results import read_measured, value_of
from fastweights_studies.places import RESULTS, ROOT
from fastweights_studies.record import Plain, Row, select

README, LAYERS, TASK_PAGE = ROOT / "README.md", ROOT / "docs" / "layers.md", ROOT / "docs" / "tasks.md"
CPU, RULES = ROOT / "docs" / "cpu.md", ROOT / "docs" / "rules.md"
LINEARIZE, TRAIN = ROOT / "docs" / "linearize.md", ROOT / "docs" / "train.md"
COMMAND = "fastweights_studies.pages.page_parts"
# Models of the training steps that the README compares with gdn, as it names them.
COMPARED = {
    "`pgdn`": Model(mixer="pgdn"),
    "`kda`": Model(mixer="kda"),
    "`rls`": Model(mixer="rls"),
    "`lattice` (encode)": Model(mixer="lattice", options={"objective": "encode"}),
    "`gka`": Model(mixer="gka"),
    "`vla`": Model(mixer="vla"),
    "`palimpsa-d`": Model(mixer="palimpsa-d"),
}
H200 = "NVIDIA H200"


def result(name: str, results: Path) -> Any:
    """A file in the format of the command that wrote it."""
    return json.loads((results / f"{name}.json").read_bytes())


def on_device(rows: tuple[Row, ...], device: str) -> list[Row]:
    return [row for row in rows if row.origin.device == device]


def needed(value: float | None) -> float:
    """A number that a sentence cannot do without."""
    if value is None:
        raise ValueError("a row that the page needs is missing in the results")
    return value


# The families of the README's table: the names of their mixers, and what they do.
FAMILIES = {
    "softmax attention": ("softmax", "keeps every key and value; what the memories are judged against"),
    "linear attention": ("linear retnet mamba2 gla", "adds key-value pairs: without decay, or with one per head or key channel"),
    "linear attention, preconditioned": (
        "pla pgla pmamba2 pmamba2-tied pmamba2-key", "divides by the energy of each key channel",
    ),
    "delta rule": ("deltanet gdn kda", "corrects what the memory answers to a key: decays as above"),
    "Preconditioned DeltaNet": ("pdn pgdn pkda", "writes quiet key channels more strongly"),
    "delta rule, other steps": (
        "longhorn longhorn-elementwise efla nlms comba", "is stable for keys of any length, or feeds back less",
    ),
    "DeltaProduct": ("deltaproduct gated-deltaproduct", "takes several steps of the delta rule per token"),
    "RWKV-7": ("rwkv7", "erases along one key and writes along another"),
    "Palimpsa": ("palimpsa-d palimpsa-m", "rewrites slowly what many keys have written to"),
    "ridge regression": ("gka mesa", "solves the decayed past again for every query (Gated KalmaNet, MesaNet)"),
    "Lattice": ("lattice ttt", "keeps slots of unit length; its baseline, test-time training"),
    "Variational Linear Attention": (
        "vla vla-conv vla-softmax vla-linear vla-deltanet", "writes along directions that a penalty bends; its baselines",
    ),
    "recursive least squares": ("rls", "is the exact regression of all values on all keys"),
}  # fmt: skip


def families(results: Path) -> str:
    """The families of the library's mixers, one line each."""
    rows = [
        [family, ", ".join(f"`{name}`" for name in names.split()), does] for family, (names, does) in FAMILIES.items()
    ]
    return table(["family", "names", "the memory"], rows)


def layers(results: Path) -> str:
    """The library's own mixers, from their declarations."""
    rows = [[f"`{name}`", MIXERS[name].summary, decay(name), MIXERS[name].state] for name in own_mixers()]
    return table(["name", "memory rule", "decay", "state"], rows)


def tasks(results: Path) -> str:
    """The library's own tasks, from their classes."""
    own = [task for task in TASKS.values() if task.__module__.startswith("fastweights.")]
    rows = [[f"`{task.name}`", task.summary, task.measure, task.unit] for task in own]
    return table(["task", "a sequence", "measured by", "`--pairs` counts"], rows)


def decay(name: str) -> str:
    """What the log decays of a layer are: their shape, and whether they are learned."""
    layer = build_mixer(name, hidden_size=8, num_heads=2)
    if "state" not in layer.probe_names():
        return ""
    if "g" not in layer.probe_names():
        return "none"
    with probe(layer, "g", detach=False) as seen:
        layer(torch.ones(1, 1, 8))
    g = seen["g"][0]
    return ("per head" if g.dim() == 3 else "per key channel") + ", not learned" * (not g.requires_grad)


PICTURE = "![Tokens per second against the context, for 1, 8 and 64 sequences](docs/images/decode-nvidia-h200.png)"


def measured(results: Path) -> str:
    """What the README says of speed, and of the block around a rule."""
    sentences = [
        decoding(results),
        serving(results),
        trainings(results),
        accelerated(results),
        block_effects.sentence(results),
    ]
    return "".join(map(list_item, sentences)) + f"\n{PICTURE}\n"


def decoding(results: Path) -> str:
    calls = on_device(read_measured("generate", "generate", results), H200)

    def shown(mixer: str, batch: int, context: int | None = None) -> str:
        return rounded(needed(speed(mixer, batch, context, results)))

    def of_calls(batch: int) -> str:
        return rounded(needed(value_of(calls, "tokens_per_second", mixer="gdn", column={"batch": batch})))

    def rounded(tokens: float) -> str:
        return f"{round(tokens, -1 if tokens < 1000 else -2):,.0f}"

    def softmax(context: int) -> str:
        one = shown("softmax", 1, context)
        if speed("softmax", 64, context, results) is None:
            return f"{one} at {context:,} (64 sequences do not fit)"
        return f"{one} and {shown('softmax', 64, context)} at {context:,}"

    return (
        f"**Generation** with 24 layers of width 1024, the captured step alone: `gdn` generates {shown('gdn', 1)} tokens per "
        f"second for one sequence and {shown('gdn', 64)} for 64, at every context length, and in whole calls of `generate()` "
        f"{of_calls(1)} and {of_calls(64)}. Softmax attention generates {softmax(2048)} tokens of "
        f"context, {softmax(16384)}, and {softmax(131072)}."
    )


def serving(results: Path) -> str:
    rows = on_device(read_measured("serving-bench", "serving_bench", results), H200)

    def tokens(mixer: str, prompt: int) -> float:
        column: dict[str, Plain] = {"prompt": prompt, "launched": False}
        return needed(value_of(rows, "tokens_per_second", mixer=mixer, column=column))

    first, second = (tokens("gdn", prompt) / tokens("softmax", prompt) for prompt in (16384, 65536))
    return (
        f"**In vLLM**, with the same memory for states or keys and values, `gdn` of 340M parameters reads and writes "
        f"{round(tokens('gdn', 16384), -3):,.0f} tokens per second of prompts of 16,384 tokens, {first:.1f} times as many as "
        f"softmax attention, and {second:.1f} times as many where prompts have 65,536 ([figure]"
        "(docs/serving.md#throughput-of-long-prompts))."
    )


def times_faster(model: str, phase: str, fla: bool, results: Path) -> float:
    """Of a phase of a model of transformers after `accelerate()`: of the medians over all turns."""
    rows = read_measured("transformers-models", "transformers", results)
    without, with_ours = (
        statistics.median(
            needed(row.value)
            for row in select(
                rows,
                measure="phase_ms",
                column={"model": model, "phase": phase, "fla": fla, "accelerated": accelerated},
            )
        )
        for accelerated in (False, True)
    )
    return without / with_ours


def trainings(results: Path) -> str:
    steps = read_steps(on_device(read_measured("training-steps", "training_step", results), H200))

    def find(model: Model) -> tuple[Step, Step]:
        """The step of a model, and that of its base in the same run."""
        return next((step, base) for base, step in steps if step.model == model)

    def ms(step: Step) -> float:
        return step.values["step_ms"]

    def ratio(model: Model) -> str:
        step, base = find(model)
        return f"{ms(step) / ms(base):.2f}"

    def trained(model: Model) -> Model:
        """As `fastweights train` runs it on one GPU."""
        return model.run(compiled="blocks", replayed=True)

    newest_gdn = max((find(trained(model))[1] for model in COMPARED.values()), key=lambda step: step.origin.date)
    first, *others, last = (f"{ratio(trained(model))} with {shown}" for shown, model in COMPARED.items())
    first = first.replace(" with", " times as long with")
    ours, theirs = find(trained(Model(mixer="gdn", options={"output_gate": "silu"})))
    assert theirs.model.library == FLA
    return (
        f"**A training step** of 24 layers on one GPU, [as `fastweights train` runs it](docs/train.md#what-a-step-does), takes "
        f"{ms(newest_gdn):.0f} ms with `gdn`, {first}, {', '.join(others)} and {last}. With an output gate `gdn` takes "
        f"{ms(ours):.0f} ms, and flash-linear-attention's model of that size {ms(theirs):.0f}."
    )


def accelerated(results: Path) -> str:
    alone, beside = (times_faster("qwen3_next", "training_step", fla, results) for fla in (False, True))
    return (
        f"**Models of transformers**: four layers of Qwen3-Next's widths train {alone:.1f} times as fast after `accelerate()` as "
        f"with transformers alone, on an H200, and {beside:.1f} times as fast as with flash-linear-attention installed, on an "
        "H100 ([docs/transformers.md](docs/transformers.md))."
    )


def recall(results: Path) -> str:
    """Accuracy of the defaults of `make recall` and of more pairs, pairs by mixers."""
    files = [results / "commands" / f"{name}.json" for name in ("recall_default", "recall_16_pairs")]
    found = {(row.pairs, row.mixer): row for file in files for row in summarize(load_results(file))}
    mixers = list(dict.fromkeys(mixer for _, mixer in found))
    lines = [
        [
            str(pairs),
            f"{found[pairs, mixers[0]].chance:.3f}",
            *(accuracy(found[pairs, mixer]) for mixer in mixers),
        ]
        for pairs in dict.fromkeys(pairs for pairs, _ in found)
    ]
    return table(["pairs", "chance", *mixers], lines)


def accuracy(row: RecallSummary) -> str:
    return f"{row.accuracy:.3f}" + " (loss still falling)" * row.undertrained


def language(results: Path) -> str:
    """Held-out perplexity of the models of `make lm`, for texts of the shortest and of the longest length."""
    models = result("commands/lm_default", results)
    ends = [0, -1]
    lengths = [models[0]["perplexities"][end]["length"] for end in ends]
    rows = [
        [model["name"], *(f"{math.exp(model['perplexities'][end]['loss']):.1f}" for end in ends)] for model in models
    ]
    return table(["held-out perplexity", *(f"texts of {length:,} tokens" for length in lengths)], rows)


def ops(results: Path) -> str:
    """The chunkwise form of every op beside the sequential one."""
    measured_rows, lines = read_measured("ops_cpu", "ops_cpu", results), []
    for op in dict.fromkeys(str(row.column["op"]) for row in measured_rows):
        own = select(measured_rows, column={"op": op})
        chunked, reference, growth, peak = (
            needed(value_of(own, what)) for what in ("torch_ms", "reference_ms", "growth", "peak_bytes")
        )
        lines.append(
            [
                f"`{op}`",
                f"{chunked:.0f}",
                f"{reference:.0f}",
                f"{reference / chunked:.1f}",
                f"{growth:.1f}",
                f"{peak / 2**20:.0f}",
            ]
        )
    memory = f"peak MB at B={ops_cpu.MEMORY['batch']}, T={ops_cpu.MEMORY['time']}"
    return table(["op and form", "chunkwise, ms", "in sequence, ms", "ratio", "time for 8 x T", memory], lines)


def interval(symbol: str, limits: Any) -> str:
    low, high = (f"{x:g}".removeprefix("0") or "0" for x in limits)
    return f"{symbol} in [{low}, {high}]"


def describe_change(row: Row) -> str:
    """What a row of first values changes beside a skip of 1."""
    default, options = recall_defaults(), dict(row.options)
    if row.column["initializer_range"] != default["initializer_range"]:
        return f"first weights of {row.column['initializer_range']:g}"
    if options == {"skip_init": 0.0}:
        return "D = 0"
    if options.get("conv_init") == "normal":
        return "filters normal"
    for attribute, symbol in (("rates", "A"), ("steps", "dt")):
        if attribute in options:
            return interval(symbol, options[attribute])
    return "none"


def first_values(results: Path) -> str:
    """Accuracy of two mixers after one change each, seed by seed."""
    rows = [row for row in read_measured("first_values", "first_values", results) if "skip_init" in row.options]
    mixers = list(dict.fromkeys(str(row.mixer) for row in rows))
    lines = []
    for change in dict.fromkeys(map(describe_change, rows)):
        own = [row for row in rows if describe_change(row) == change]
        cells = (_by_seed(select(own, mixer=mixer)) for mixer in mixers)
        lines.append([change, *cells])
    return table(["change", *(f"`{mixer}`" for mixer in mixers)], lines)


def _by_seed(rows: Sequence[Row]) -> str:
    return " ".join(share(needed(row.value)) for row in sorted(rows, key=lambda row: row.seed or 0))


def attention(results: Path) -> str:
    """Accuracy of softmax attention by layers, first weights and rate, seed by seed; the defaults are one of these settings."""
    rows = select(read_measured("first_values", "first_values", results), mixer="softmax", options={})
    lines, rates = [], (0.003, 0.01)
    settings = {(row.column["layers"], row.column["initializer_range"]) for row in rows}
    for layers, std in sorted(settings):
        own = select(rows, column={"layers": layers, "initializer_range": std})
        by_rate = (_by_seed([row for row in own if row.run["learning_rate"] == rate]) for rate in rates)
        lines.append([str(layers), f"{std:g}", *by_rate])
    return table(["layers", "first weights", *(f"rate {rate:g}" for rate in rates)], lines)


Part = Callable[[Path], str]
PARTS: dict[Path, dict[str, Part]] = {
    README: {"layers": families, "measured": measured},
    LAYERS: {"layers": layers, "block effects": block_effects.measured},
    TASK_PAGE: {"tasks": tasks},
    CPU: {"recall": recall, "language models": language, "ops": ops},
    RULES: {"first values": first_values, "attention": attention},
    LINEARIZE: {"students": linearization.measured},
    TRAIN: {"several gpus": scaling.data_parallel, "divided rows": scaling.context_parallel},
}


def render(page: Path, results: Path = RESULTS) -> str:
    """The page with its generated parts as the registry and the results have them."""
    text = page.read_text()
    for name, part in PARTS[page].items():
        text = replace_part(text, name, part(results), COMMAND)
    return text


PAGES = [Page(path, partial(render, path), COMMAND) for path in PARTS]


if __name__ == "__main__":
    for page in PAGES:
        page.write()
