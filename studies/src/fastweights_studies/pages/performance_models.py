"""The parts of docs/performance.md about whole layers and models: training steps, generate(), decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights_studies.pages.performance_text import number, table


def measured(row: Mapping[str, Any]) -> str:
    return f"{row['measured']['time'][:10]}, files {row['measured']['source']}"


def steps_page(content: Mapping[str, Any]) -> str:
    """Every model below the one that its step is compared with."""
    rows: dict[tuple[str, int, int], list[list[str]]] = {}
    for row in content["comparisons"].values():
        base, *_ = row["models"]
        group = rows.setdefault((base, row["batch"], row["length"]), [])
        for name, model in row["models"].items():
            if name == base and group:
                continue
            step, of_base = model["step, ms"][0], row["models"][base]["step, ms"][0]
            beside = ["", ""] if name == base else [number(of_base), f"{step / of_base:.2f}"]
            group.append(
                [
                    name, f"{row['batch']} x {row['length']:,}", number(step), *beside,
                    number(model["tokens/s"] / 1e3), number(model["activations, GiB"]), number(model["first step, s"]),
                    measured(row),
                ]
            )  # fmt: skip
    text = (
        f"## Training steps, {content['device']}\n\nForward, backward and fused AdamW under bfloat16 autocast; "
        "`training_steps.py`. The base of a model is the\nnearest row above it without a ratio. Both took their steps in turn. "
        "The row of a base has its times of the first such run.\n"
    )
    head = [
        "model", "tokens per step", "ms per step", "ms of the base", "ratio", "thousand tokens/s", "GiB", "first step, s",
        "measured",
    ]  # fmt: skip
    return "\n".join([text, table(head, [row for group in rows.values() for row in group])])


def generate_page(content: Mapping[str, Any]) -> str:
    rows = [
        [
            mixer, stage.removeprefix("batch "), *(number(part[name]) for name in (
                "ms per token", "all, ms per token", "step, ms", "without a graph, ms per token", "tokens/s",
            )), measured(row),
        ]
        for mixer, row in content["mixers"].items() for stage, part in row.items() if stage.startswith("batch ")
    ]  # fmt: skip
    prompts = [
        f"- {mixer}: {stage} tokens in {number(part['ms'])} ms, {part['share of the rate']:.0%} of the rate of matrix products."
        for mixer, row in content["mixers"].items()
        for stage, part in row.items()
        if stage.startswith("prefill")
    ]
    prompt = next(iter(content["mixers"].values()))["prompt"]
    text = (
        f"## generate(), {content['device']}\n\n24 layers of width 1024 in bfloat16 after a prompt of {prompt:,} tokens; "
        "`generate.py`. *all* is the whole call over its 128\ntokens, prompt and capture included; *step* the replayed graph by "
        "itself.\n"
    )
    head = ["mixer", "sequences", "ms per token", "all", "step", "without a graph", "tokens/s", "measured"]
    return "\n".join([text, table(head, rows), "\n".join(prompts) + "\n"])


def decode_page(content: Mapping[str, Any]) -> str:
    """One line for every mixer, or context of softmax attention: the state, then time and speed by number of sequences."""
    rows = list(content["rows"].values())
    batches = sorted({row["batch"] for row in rows})
    lines = []
    for mixer, context in dict.fromkeys((row["mixer"], row["context"]) for row in rows):
        found = {row["batch"]: row for row in rows if (row["mixer"], row["context"]) == (mixer, context)}
        state = next((row["state, bytes per sequence"] for row in found.values() if "tokens/s" in row), None)
        cells = [mixer if context is None else f"{mixer}, {context:,} tokens", number(state and state / 1e6)]
        for batch in batches:
            row = found.get(batch, {})
            cells += (
                [number(row["step, ms"][0]), f"{row['tokens/s']:,.0f}"]
                if "tokens/s" in row
                else [row.get("refused", "–"), "–"]
            )
        lines.append([*cells, measured(next(iter(found.values())))])
    image = f"images/{decode_image(content)}"
    text = (
        f"## Tokens per second of decoding, {content['device']}\n\n![Tokens per second against the context, for 1, 8 and 64 "
        f"sequences]({image})\n\nThe captured step alone, {content['layers']} layers of width 1024 in bfloat16; "
        "`decode_table.py`. Softmax attention with full slots. Grey lines\nof the figure are the other memories of the table. MB "
        "of state of all layers per sequence.\n"
    )
    head = ["memory", "state, MB", *(x for n in batches for x in (f"ms, {n} sequence{'s'[: n > 1]}", "tokens/s"))]
    head.append("measured")
    return "\n".join([text, table(head, lines)])


def decode_image(content: Mapping[str, Any]) -> str:
    return f"decode-{content['device'].replace(' ', '-').lower()}.png"


def layers_page(content: Mapping[str, Any]) -> str:
    """One token per sequence of a whole layer beside a layer with another memory."""
    rows = [
        [
            pair, width.removeprefix("width "), *(number(layer["ms"][0] * 1e3) for layer in found["layers"].values()),
            f"{found['tokens/s of the base']:.2f}",
        ]
        for pair, widths in content["pairs"].items() for width, found in widths.items() if width.startswith("width ")
    ]  # fmt: skip
    text = f"## One token of a whole layer, {content['device']}\n\nDevice time; `decode_layers.py`.\n"
    return "\n".join([text, table(["layers", "width", "us", "us of the second", "tokens/s of the second"], rows)])
