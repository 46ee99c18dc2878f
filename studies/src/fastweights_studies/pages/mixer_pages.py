"""The pages of the memories, from their declarations, docs/rules.md and the result files, for docs/hooks.py."""

from __future__ import annotations

import re

import torch

from fastweights.layers import MIXERS
from fastweights.layers.choice import described_options
from fastweights.layers.registry import mixer_spec
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.pages import claims, evidence
from fastweights_studies.pages.rendering import anchor, escape_cell, number, table
from fastweights_studies.places import DOCS

RULES_PAGE = DOCS / "rules.md"
DEPARTURES = "Departures from the papers"  # heading in docs/rules.md of a list of "- `mixer`, `mixer`: text"
DEPARTURE = re.compile(r"((?:`[\w.-]+`, )*`[\w.-]+`): (.+)")


def names() -> list[str]:
    return list(MIXERS)


def heading_of(op: str, text: str) -> str:
    """The heading in docs/rules.md that names the op."""
    for heading in re.findall(r"^## (.+)$", text, re.MULTILINE):
        if f"`{op}`" in heading:
            return str(heading)
    raise ValueError(f"docs/rules.md needs a section with `{op}` in its heading")


def departures(text: str) -> dict[str, list[str]]:
    """Where each mixer departs from its paper, from docs/rules.md. That of a mixer without departures begins with "None."."""
    section = next(part for part in text.split("\n## ") if part.startswith(f"{DEPARTURES}\n"))
    found: dict[str, list[str]] = {}
    for item in re.split(r"\n- ", section)[1:]:
        declared = DEPARTURE.fullmatch(" ".join(item.split()))
        if declared is None:
            raise ValueError(
                f"an item of {DEPARTURES!r} in docs/rules.md must be '- `mixer`, `mixer`: text', got {item!r}"
            )
        for name in re.findall(r"`(.+?)`", declared[1]):
            found.setdefault(name, []).append(declared[2])
    return found


def facts(name: str) -> str:
    spec = mixer_spec(name, {})
    one = f"`fastweights.layers.{spec.layer.__name__}`"
    rows = [
        ["source", escape_cell(spec.source)],
        ["state", spec.state],
        ["cost", spec.cost or "not stated"],
        ["class", f"[{one}](../reference/layers.md)"],
        ["GPU kernels", evidence.kernels(name)],
    ]
    return table(["", ""], rows) + (
        "\nH heads of K key and V value channels. State: numbers per sequence and layer. Cost: multiply-adds of the memory rule "
        "per token, forward, where tokens are read in chunks of C.\n"
    )


def shapes(name: str) -> str:
    """Input, output and what is kept between tokens, at one width."""
    layer = evidence.layer(name)
    count = sum(parameter.numel() for parameter in layer.parameters())
    begin = (
        f"`x [B, T, D]` gives `y [B, T, D]`. A layer of width D = {evidence.WIDTH} with {evidence.HEADS} heads has {count:,} "
        "parameters, and keeps of each sequence "
    )
    if layer.state_size(1) != layer.state_size(2):
        return f"{begin}the key and the value of every token that it has read.\n"
    cache = layer.state_spec(torch.bfloat16)
    rows = [
        [what, f"`{key}`", str(list(x.shape[1:])), str(x.dtype).removeprefix("torch.")]
        for what, held in (("memory", cache.memory), ("beside it", cache.context))
        for key, x in held.items()
    ]
    return f"{begin}in bfloat16:\n\n{table(['what', 'name', 'shape', 'dtype'], rows)}"


def options(name: str) -> str:
    rows = [
        [f"`{option.name}`", f"`{option.default or 'required'}`", escape_cell(option.meaning)]
        for option in described_options(mixer_spec(name, {}))
    ]
    return table(["option", "default", "meaning"], rows)


def rule(name: str) -> str:
    """Departures from the paper, and links to the sections about the ops."""
    text = RULES_PAGE.read_text()
    headings = [heading_of(op, text) for op in evidence.rules_of(name)]
    links = [f"[{heading.partition(':')[0]}](../rules.md#{anchor(heading)})" for heading in dict.fromkeys(headings)]
    found = [f"- {item}\n" for item in departures(text).get(name, ["Not stated."])]
    described = f" The rule, its cost and its limits: {', '.join(links)}." if links else ""
    return (
        f"## Departures from the paper\n\n{''.join(found)}\n[The list for all memories](../rules.md#{anchor(DEPARTURES)}) begins "
        f"with what was compared.{described}\n"
    )


def decoding(name: str) -> str:
    rows = []
    for row in evidence.decoding(name):
        context = "any" if row.column["context"] is None else f"{row.column['context']:,}"
        speed = f"{row.value:,.0f}" if row.measure == "tokens_per_second" else "does not fit"
        rows.append([row.origin.device, str(row.column["batch"]), context, speed])
    if not rows:
        return "Decoding speed: not measured yet.\n"
    return "Tokens per second of decoding, 24 layers of width 1024 ([performance](../performance.md)):\n\n" + table(
        ["device", "sequences", "context", "tokens per second"], rows
    )


def training(name: str) -> str:
    rows = []
    for step, base in evidence.training_steps(name):
        beside = "" if base is None else f"{evidence.ratio_of(step, base):.2f} of `{base.model.title}`"
        tokens = f"{step.batch} x {step.length:,}"
        ms = number(step.values["step_ms"])
        rows.append([f"`{step.model.title}`", tokens, ms, beside, step.origin.device])
    ops = [[f"({size})", number(ours), number(peer), device] for device, size, ours, peer in evidence.op_times(name)]
    steps = table(["model", "tokens per step", "ms per step", "time of a step", "device"], rows)
    times = table(["(B, T, H, K, V)", "ms", "flash-linear-attention, ms", "device"], ops)
    return "\n".join(
        [
            f"Training steps of whole models:\n\n{steps}" if rows else "Training steps: not measured yet.\n",
            *([f"The op alone, forward and backward:\n\n{times}"] if ops else []),
        ]
    )


def recall(name: str) -> str:
    found = evidence.first_recall(name)
    if found is None:
        return "Recall: not measured yet.\n"
    return (
        f"Accuracy on 4 key-value pairs after a short training with one seed (guessing has 0.25): {found:.3f}, of the layer as "
        "published. [Its settings](../rules.md#defaults-of-recall) are those of `fastweights recall --block published`.\n"
    )


def leaderboard(name: str) -> str:
    """The mixer's numbers in the trained parts at full size, beside the best number of each column."""
    rows = [
        [
            f"{part}, {PARTS[part].measure}",
            column,
            found[name].text,
            f"{next(iter(found.values())).text}, `{next(iter(found))}`",
        ]
        for part in evidence.TRAINED
        for column, found in evidence.board(part).items()
        if name in found
    ]
    if not rows:
        return "Leaderboard at full size: not measured yet.\n"
    return (
        "[Leaderboard](../leaderboard.md) at full size, at equal state and equal parameters. Numbers without ± are of one seed, "
        "so small differences mean nothing; ± is half the spread over seeds. In parentheses stands the place, = for a tie. "
        "Marks: \\* still learning (not marked for language models), ! some runs diverged, ° no better than guessing.\n\n"
        + table(["part", "column", "this memory", "best number"], rows)
    )


def claims_table(name: str) -> str:
    """What papers claim about a memory and what was found, with the notes of these claims."""
    about, records = evidence.claims_about(name), evidence.records_of(evidence.RESULTS)
    rows = [
        [
            f"[{claim.name}](../claims.md#{claim.name.lower()})",
            f"**{status}**{claims.mark(claim, records)}",
            escape_cell(claim.says),
        ]
        for claim, status in about
    ]
    if not rows:
        return "Claims of papers: the ledger has none about this memory.\n"
    return (
        "Claims of papers about it, measured here:\n\n"
        + table(["claim", "found", "the paper says"], rows)
        + claims.notes((claim for claim, _ in about), records)
    )


def own_table(name: str) -> list[str]:
    """Results of our own in which the memory stands, as one block; none for other memories."""
    rows = [
        [f"[{claim.name}](../{place})", *(f"**{size}**" if size else "–" for size in sizes), escape_cell(claim.says)]
        for claim, place, sizes in evidence.own_about(name)
    ]
    if not rows:
        return []
    head = ["result", "found", "at its larger size, on a GPU", "asked of all its memories together"]
    return ["Results of our own that train it or measure its steps:\n\n" + table(head, rows)]


def render(name: str) -> str:
    spec = mixer_spec(name, {})
    summary = spec.summary[0].upper() + spec.summary[1:]
    return "\n".join(
        [
            f"# {name}\n",
            f"{summary}.\n",
            f"    {spec.equation}\n",
            facts(name),
            f"## Shapes\n\n{shapes(name)}",
            "## Evidence\n",
            decoding(name),
            training(name),
            recall(name),
            leaderboard(name),
            claims_table(name),
            *own_table(name),
            rule(name),
            "## Options\n",
            f'`build_mixer("{name}", hidden_size=..., num_heads=..., OPTION=VALUE)`, or `{name}:OPTION=VALUE` in a command.\n',
            options(name),
        ]
    )


def index() -> str:
    rows = [[f"[`{name}`]({name}.md)", escape_cell(spec.summary), spec.state] for name, spec in MIXERS.items()]
    compared = "[The leaderboard](../leaderboard.md#all-memories) compares them."
    text = f"# Memories\n\n{compared} State: numbers per sequence and layer.\n"
    return f"{text}\n{table(['name', 'what it is', 'state'], rows)}"


def render_all() -> dict[str, str]:
    """All pages by file name, the list of them first."""
    return {"index.md": index(), **{f"{name}.md": render(name) for name in names()}}
