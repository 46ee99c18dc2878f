"""The parts of docs/performance.md about whole layers and models: training steps, generate(), decoding."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.layers import MixerChoice
from fastweights_studies.measure.models import read_steps
from fastweights_studies.measure.rows import name_device
from fastweights_studies.pages.rendering import number, table
from fastweights_studies.pages.results import value_of
from fastweights_studies.record import Origin, Plain, Row, select

__all__ = ["decode_image", "decode_page", "generate_page", "layers_page", "steps_page"]


def measured(origin: Origin) -> str:
    return f"{origin.date[:10]}, files {origin.versions.get('files', 'unknown')}"


def steps_page(rows: Sequence[Row], device: str) -> str:
    """Every model below the one that its step is compared with."""
    groups: dict[tuple[str, int, int], list[list[str]]] = {}
    for base, model in read_steps(rows):
        group = groups.setdefault((base.model.name, base.batch, base.length), [])
        for step in [base, model] if model.model != base.model else [base]:
            is_base = step is base
            if is_base and group:
                continue
            ms, of_base = step.values["step_ms"], base.values["step_ms"]
            group.append(
                [
                    step.model.title,
                    f"{step.batch} x {step.length:,}",
                    number(ms),
                    *(["", ""] if is_base else [number(of_base), f"{ms / of_base:.2f}"]),
                    number(step.values["tokens_per_second"] / 1e3),
                    number(step.values["activations_bytes"] / 2**30),
                    number(step.values["first_step_s"]),
                    measured(step.origin),
                ]
            )
    text = (
        f"## Training steps, {device}\n\nForward, backward and fused AdamW under bfloat16 autocast; "
        "`training_steps.py`. The base of a model is the\nnearest row above it without a ratio. Both took their steps in turn. "
        "The row of a base has its times of the first such run.\n"
    )
    head = [
        "model", "tokens per step", "ms per step", "ms of the base", "ratio", "thousand tokens/s", "GiB", "first step, s",
        "measured",
    ]  # fmt: skip
    return "\n".join([text, table(head, [row for group in groups.values() for row in group])])


def generate_page(rows: Sequence[Row], device: str) -> str:
    shown = (
        "token_ms", "token_of_whole_call_ms", "step_ms", "token_without_graph_ms", "tokens_per_second", "first_short_call_ms",
        "short_call_ms", "first_token_ms",
    )  # fmt: skip
    lines, prompts = [], []
    for mixer in dict.fromkeys(row.mixer for row in rows):
        for row in select(rows, mixer=mixer, measure="token_ms"):
            cells = [number(value_of(rows, measure, mixer=mixer, column=row.column)) for measure in shown]
            prompt = f"{row.column['prompt']:,}"
            lines.append([str(mixer), str(row.column["batch"]), prompt, *cells, measured(row.origin)])
        for row in select(rows, mixer=mixer, measure="prefill_ms"):
            rate = value_of(rows, "prefill_share_of_rate", mixer=mixer, column=row.column)
            prompts.append(
                f"- {mixer}: prefill of {row.column['prompt']} tokens in {number(row.value)} ms, {rate:.0%} of the rate of "
                "matrix products."
            )
    text = (
        f"## generate(), {device}\n\n24 layers of width 1024 in bfloat16; `generate.py`. *all* is the whole call over its 128 "
        "tokens, prompt included; *step* the\nreplayed graph by itself. A short call reads 512 tokens and writes 16: the first "
        "of its kind, which captures the graph, and later\nones; *one token* is a later call that writes one.\n"
    )
    head = [
        "mixer", "sequences", "prompt", "ms per token", "all", "step", "without a graph", "tokens/s", "first short call, ms",
        "later", "one token", "measured",
    ]  # fmt: skip
    return "\n".join([text, table(head, lines), "\n".join(prompts) + "\n"])


def decode_page(rows: Sequence[Row], device: str) -> str:
    """One line for every mixer, or context of softmax attention: the state, then time and speed by number of sequences."""
    batches = sorted({int(row.column["batch"]) for row in rows})  # type: ignore[arg-type]
    lines = []
    for mixer, context in dict.fromkeys((row.mixer, row.column["context"]) for row in rows):
        own = select(rows, mixer=mixer, column={"context": context})
        state = value_of(own, "state_bytes")
        cells = [str(mixer) if context is None else f"{mixer}, {context:,} tokens", number(state and state / 1e6)]
        for batch in batches:
            column: dict[str, Plain] = {"batch": batch}
            speed = value_of(own, "tokens_per_second", column=column)
            if speed is not None:
                cells += [number(value_of(own, "step_ms", column=column)), f"{speed:,.0f}"]
            else:
                cells += ["does not fit" if select(own, measure="fits", column=column) else "–", "–"]
        lines.append([*cells, "; ".join(dict.fromkeys(measured(row.origin) for row in own))])
    text = (
        f"## Tokens per second of decoding, {device}\n\n![Tokens per second against the context, for 1, 8 and 64 "
        f"sequences](images/{decode_image(device)})\n\nThe captured step alone, {rows[0].column['layers']} layers of width 1024 "
        "in bfloat16; `decode_table.py`. Softmax attention with full slots. Grey lines\nof the figure are the other memories of "
        "the table. MB of state of all layers per sequence.\n"
    )
    head = ["memory", "state, MB", *(x for n in batches for x in (f"ms, {n} sequence{'s'[: n > 1]}", "tokens/s"))]
    head.append("measured")
    return "\n".join([text, table(head, lines)])


def decode_image(device: str) -> str:
    return f"decode-{name_device(device)}.png"


def layers_page(rows: Sequence[Row], device: str) -> str:
    """One token per sequence of a whole layer beside a layer with another memory."""
    lines = []
    for layer in select(rows, measure="step_ms"):
        if layer.run["side"] != "layer":
            continue
        size = {name: layer.column[name] for name in ("width", "batch")}
        (base,) = select(rows, measure="step_ms", column=size, run={"pair": layer.run["pair"], "side": "base"})
        pool = " in a pool" * bool(layer.column["pool"])
        pair = f"{title_of(layer)}{pool} beside {title_of(base)}, {size['batch']} sequences"
        assert layer.value is not None and base.value is not None
        lines.append(
            [
                pair,
                str(size["width"]),
                number(layer.value * 1e3),
                number(base.value * 1e3),
                f"{base.value / layer.value:.2f}",
            ]
        )
    text = f"## One token of a whole layer, {device}\n\nDevice time; `decode_layers.py`.\n"
    return "\n".join([text, table(["layers", "width", "us", "us of the second", "tokens/s of the second"], lines)])


def title_of(row: Row) -> str:
    """The layer as `--mixers` takes it."""
    return MixerChoice(str(row.mixer), row.options).label
