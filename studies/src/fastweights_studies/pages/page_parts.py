"""Writes the generated parts of README.md, docs/cpu.md and docs/rules.md from the registry of mixers and studies/results.

python -m fastweights_studies.pages.page_parts
"""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastweights.layers import MIXERS, build_mixer, probe
from fastweights_studies.leaderboard import PARTS as BOARDS
from fastweights_studies.leaderboard import part_rows
from fastweights_studies.pages.performance_text import table
from fastweights_studies.places import RESULTS, ROOT

README, CPU, RULES = ROOT / "README.md", ROOT / "docs" / "cpu.md", ROOT / "docs" / "rules.md"
COMMAND = "python -m fastweights_studies.pages.page_parts"
WIDTH = 130  # of a line of text
REPLAYED = ", compiled by blocks, replayed"
# Mixers of the training steps, by the names that the benchmark has for them.
COMPARED = {
    "pgdn": "`pgdn`", "kda": "`kda`", "rls": "`rls`", "lattice-encode": "`lattice` (encode)", "gka": "`gka`", "vla": "`vla`",
    "palimpsa-d": "`palimpsa-d`",
}  # fmt: skip
# Mixers of the README's sentence on recall.
RECALLED = ("linear", "deltanet", "pgdn", "rls", "gdn", "mesa", "gka", "vla", "kda", "mamba2")


def result(name: str, results: Path) -> Any:
    return json.loads((results / f"{name}.json").read_bytes())


def item(text: str) -> str:
    """An item of a list; no line breaks inside code."""
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    filled = textwrap.fill(whole, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return filled.replace("\0", " ") + "\n"


def share(x: float) -> str:
    """Two digits of a number below 1."""
    return f"{x:.2f}".removeprefix("0")


def layers(results: Path) -> str:
    """The library's own mixers, from their declarations; a mixer of a plug-in is none of them."""
    own = {name: spec for name, spec in MIXERS.items() if spec.layer.__module__.startswith("fastweights.")}
    rows = [[f"`{name}`", spec.summary, decay(name), spec.state] for name, spec in own.items()]
    return table(["name", "memory rule", "decay", "state"], rows)


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


def measured(results: Path) -> str:
    """What the README says of speed, and of recall at equal state."""
    return "".join([decoding(results), trainings(results), recall_at_equal_state(results)])


def decoding(results: Path) -> str:
    rows = result("decode-table-nvidia-h200", results)["rows"]
    prompt = result("generate-nvidia-h200", results)["mixers"]["gdn"]["prefill of 16384"]["ms"]

    def speed(row: str) -> str:
        tokens = rows[row]["tokens/s"]
        return f"{round(tokens, -1 if tokens < 1000 else -2):,.0f}"

    def softmax(context: int) -> str:
        one, many = (f"softmax, batch {batch}, context {context}" for batch in (1, 64))
        if "refused" in rows[many]:
            return f"{speed(one)} at {context:,} (64 sequences do not fit)"
        return f"{speed(one)} and {speed(many)} at {context:,}"

    text = item(
        f"Decoding with 24 layers of width 1024, the captured step alone: `gdn` generates {speed('gdn, batch 1')} tokens per "
        f"second for one sequence and {speed('gdn, batch 64')} for 64, at every context length. Softmax attention generates "
        f"{softmax(2048)} tokens of context, {softmax(16384)}, and {softmax(131072)}. `gdn` reads a prompt at "
        f"{round(16384 / prompt * 1e3, -4):,.0f} tokens per second."
    )
    picture = "![Tokens per second against the context, for 1, 8 and 64 sequences](docs/images/decode-nvidia-h200.png)"
    return f"{text}\n{picture}\n\n"


def trainings(results: Path) -> str:
    steps = result("training-steps-nvidia-h200", results)["comparisons"]
    alone, beside = (
        result(f"transformers-models-{where}", results)["models"]["qwen3_next"]["times"]["training step"][
            "times faster"
        ]
        for where in ("nvidia-h200", "and-fla-nvidia-h100-80gb-hbm3")
    )
    gpus = result("scaling-nvidia-h100-80gb-hbm3", results)["trainings"]["gdn-1b"]
    ddp, fsdp = (share(gpus[f"2 GPUs, {way}"]["share of one GPU"]) for way in ("DDP", "FSDP2"))

    def step(comparison: str, model: str) -> float:
        return float(steps[comparison]["models"][model]["step, ms"][0])

    def ratio(comparison: str) -> str:
        return f"{steps[comparison]['step of the base']:.2f}"

    compared = [f"24 layers of {name}{REPLAYED}" for name in COMPARED]
    gdn = statistics.median(step(one, f"24 layers of gdn{REPLAYED}") for one in compared)
    eager = step("24 layers of gdn, replayed", "24 layers of gdn")
    first, *others, last = (f"{ratio(one)} with {shown}" for one, shown in zip(compared, COMPARED.values()))
    first = first.replace(" with", " times as long with")
    gated = f"24 layers of gated gdn{REPLAYED}"
    peer = "24 layers of flash-linear-attention's gdn"
    theirs, their_eager = step(gated, f"{peer}, compiled, replayed"), step("24 layers of gated gdn", peer)
    return "".join(
        map(
            item,
            [
                f"A training step with 24 layers takes {gdn:.0f} ms with `gdn`, compiled by blocks and replayed as a CUDA graph, "
                "as in `fastweights train` on one GPU; a step of `fastweights train` also reads packed documents and clips "
                f"gradients ([how](docs/train.md#what-a-step-does)). Called eagerly it takes {eager:.0f} ms. Compiled and "
                f"replayed, it takes {', '.join([first, *others])} and {last}.",
                f"Two H100 train the 1B preset of `gdn`. With DDP each GPU processes {ddp} of the tokens per second of one GPU "
                f"alone, with FSDP2 {fsdp} ([how](docs/train.md#on-several-gpus)).",
                f"With an output gate, compiled by blocks and replayed, `gdn` takes {step(gated, gated):.0f} ms, where "
                f"flash-linear-attention's model of that size takes {theirs:.0f} compiled and replayed in the same way. Called "
                f"eagerly, in another run, it takes {step('24 layers of gated gdn', '24 layers of gated gdn'):.0f} ms and theirs "
                f"{their_eager:.0f}.",
                f"A training step of Palimpsa's 760M model takes {ratio('palimpsa-d-760m')} times as long as that of the same "
                f"model with simple gated linear attention, and {ratio('palimpsa-d-170m')} times at 170M. A step of the 2.8B "
                f"hybrid of softmax attention and Gated KalmaNet takes {ratio('gka-hybrid-2.8b')} times as long as that of the "
                "same hybrid with `gdn`.",
                f"Four layers of Qwen3-Next's widths train {alone:.1f} times as fast after `accelerate()` as with transformers "
                f"alone, on an H200, and {beside:.1f} times as fast as with flash-linear-attention installed, on an H100 "
                "([docs/transformers.md](docs/transformers.md)).",
            ],
        )
    )


def recall_at_equal_state(results: Path) -> str:
    """The best mixer of one column of the leaderboard, and some others."""
    column = "shuffled, 32 pairs, heads of 16"
    part = BOARDS["mqar"]
    rows = part_rows(part, "full", results / "leaderboard", results)
    entries = {entry.label: entry for entry in part.entries(rows) if entry.column == column}
    means = {name: entry.mean for name, entry in entries.items()}
    first = max(means, key=means.__getitem__)
    others = sorted((name for name in RECALLED if name != first), key=means.__getitem__, reverse=True)
    shown = ", ".join(f"{means[name]:.3f} with `{name}`" for name in others)
    steps, seeds = entries[first].count("steps"), max(len(entry.values) for entry in entries.values())
    guessing, gpu = entries["softmax"].run["chance"], entries[first].origins[0].device.split()[1]
    return item(
        f"Recall of 32 shuffled pairs, with states of the size that linear attention has with two heads of 16 channels, after "
        f"{steps:,} steps on an {gpu} and with {'one seed' if seeds == 1 else f'at most {seeds} seeds'}: {means[first]:.3f} with "
        f"`{first}`, the best of {len(entries)}, {shown}. Guessing "
        f"has {guessing:.3f}. The [leaderboard](docs/leaderboard.md) has other tasks and sizes, and marks those that were still "
        "learning."
    )


def recall(results: Path) -> str:
    """Accuracy of the defaults of `make recall`, pairs by mixers."""
    rows = result("recall_default", results)["summary"]
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    by = {(row["pairs"], row["mixer"]): row for row in rows}
    lines = [
        [
            str(pairs),
            f"{by[pairs, mixers[0]]['chance']:.3f}",
            *(accuracy(by[pairs, mixer]) for mixer in mixers),
        ]
        for pairs in dict.fromkeys(pairs for pairs, _ in by)
    ]
    return table(["pairs", "chance", *mixers], lines)


def accuracy(row: Mapping[str, Any]) -> str:
    return f"{row['accuracy']:.3f}" + " (loss still falling)" * row["undertrained"]


def language(results: Path) -> str:
    """Held-out perplexity of the models of `make lm`, for texts of the shortest and of the longest length."""
    models = result("lm_default", results)
    ends = [0, -1]
    lengths = [models[0]["perplexities"][end]["length"] for end in ends]
    rows = [
        [model["name"], *(f"{math.exp(model['perplexities'][end]['loss']):.1f}" for end in ends)] for model in models
    ]
    return table(["held-out perplexity", *(f"texts of {length:,} tokens" for length in lengths)], rows)


def ops(results: Path) -> str:
    """The chunkwise form of every op beside the sequential one."""
    content = result("ops_cpu", results)
    rows = [
        [
            f"`{name}`", f"{row['torch_ms']:.0f}", f"{row['reference_ms']:.0f}", f"{row['speedup']:.1f}",
            f"{row['growth_8x']:.1f}", f"{row['peak_mb']:.0f}",
        ]
        for name, row in content["ops"].items()
    ]  # fmt: skip
    memory = f"peak MB at B={content['memory']['batch']}, T={content['memory']['time']}"
    return table(["op and form", "chunkwise, ms", "in sequence, ms", "ratio", "time for 8 x T", memory], rows)


def first_values(results: Path) -> str:
    """Accuracy of two mixers after one change each, of two seeds."""
    content = result("first_values", results)
    changed = (
        "one change from skip_init 1",
        "initializer_range 0.02, skip_init 1",
        "initializer_range 0.1, skip_init 1",
    )
    found: dict[str, dict[str, list[str]]] = {}
    for row in (row for name in changed for row in content[name]):
        mixer, _, change = row["mixer"].partition(": ")
        cells = found.setdefault(change.replace("initializer_range", "first weights of"), {})
        cells.setdefault(f"`{mixer}`", []).append(share(row["accuracy"]))
    mixers = list(found["none"])
    return table(
        ["change", *mixers], [[change, *(" ".join(cells[one]) for one in mixers)] for change, cells in found.items()]
    )


def attention(results: Path) -> str:
    """Accuracy of softmax attention by layers, first weights and rate; the defaults are one of these settings."""
    content = result("first_values", results)
    default = content["settings"]
    settings = {(str(default["layers"]), f"{default['initializer_range']:g}"): content["defaults of every mixer"]}
    for name, rows in content.items():
        if named := re.fullmatch(r"attention, layers (\d+), initializer_range (\S+)", name):
            settings[named[1], named[2]] = rows
    lines, rates = [], (0.003, 0.01)
    for shape, rows in sorted(settings.items()):
        found = {row["learning_rate"]: row["accuracy"] for row in rows if (row["mixer"], row["seed"]) == ("softmax", 0)}
        lines.append([*shape, *(share(found[rate]) for rate in rates)])
    return table(["layers", "first weights", *(f"rate {rate:g}" for rate in rates)], lines)


Part = Callable[[Path], str]
PARTS: dict[Path, dict[str, Part]] = {
    README: {"layers": layers, "measured": measured},
    CPU: {"recall": recall, "language models": language, "ops": ops},
    RULES: {"first values": first_values, "attention": attention},
}


def render(page: Path, results: Path = RESULTS) -> str:
    """The page with its generated parts as the registry and the results have them.

    Raises:
        ValueError: the page lacks the marks of a part.
    """
    text = page.read_text()
    for name, part in PARTS[page].items():
        begin, end = f"<!-- {name}: written by `{COMMAND}` -->", f"<!-- end of {name} -->"
        marks = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if not marks.search(text):
            raise ValueError(f"{page.name} needs the lines {begin} and {end}")
        written = f"{begin}\n\n{part(results)}\n{end}"
        text = marks.sub(lambda _, written=written: written, text)
    return text


if __name__ == "__main__":
    for page in PARTS:
        page.write_text(render(page))
        print(f"written to {page}")
