"""What documents of very different lengths cost on a CPU: one of 4,096 tokens packed beside 1,024 of one token, against one row
of as many tokens. Every op in every form that its declaration lists, and every mixer; float32, the shortest time of one
processor, both rows in turn.

Commands, each `python -m fastweights_studies.measure.packed_documents` with these options:
    (none)                    all, writes studies/results/packed_documents.json
    --only delta_rule,gdn     names that begin so; writes with --output only
    --before FILE             with the rows of an earlier result file beside its own, marked in `run`
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fastweights.layers import MIXERS, build_mixer
from fastweights.testing import CASES
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import find_rows, make_rows, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "packed_documents"
RESULT = RESULTS / "packed_documents.json"
LONG, SHORT = 4096, 1024
HEADS, CHANNELS = 4, 32
LONGEST = 10.0  # seconds, after which a call is not repeated
Call = Callable[[Tensor | None], Tensor]


def call_op(name: str) -> Call:
    case = CASES[name]
    sizes = {"batch": 1, "time": LONG + SHORT, "heads": HEADS, "key": CHANNELS, "value": CHANNELS}
    inputs = case.draw(**sizes, dtype=torch.float32).map(lambda x: x.requires_grad_())
    options = {**case.measured, "backend": "torch", "output_final_state": False}
    return lambda cu_seqlens: case(inputs, cu_seqlens=cu_seqlens, **options)[0]


def call_mixer(name: str) -> Call:
    layer = build_mixer(name, hidden_size=HEADS * CHANNELS, num_heads=HEADS)
    x = torch.randn(1, LONG + SHORT, HEADS * CHANNELS, requires_grad=True)
    return lambda cu_seqlens: layer(x, cu_seqlens=cu_seqlens)


def seconds(call: Call, cu_seqlens: Tensor | None, backward: bool) -> float:
    start = time.process_time()  # which other programs change little
    with torch.set_grad_enabled(backward):
        o = call(cu_seqlens)
        if backward:
            o.sum().backward()
    return time.process_time() - start


def measure(call: Call, repeats: int) -> dict[bool, dict[str, float]]:
    """Milliseconds of one row and of packed documents, by pass."""
    documents = torch.tensor([0, *range(LONG, LONG + SHORT + 1)])
    seconds(call, documents[:2] * (LONG + SHORT) // LONG, True)  # buffers that stay
    found: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for what, backward in (("forward", False), ("training", True)):
        pairs: list[tuple[float, float]] = []
        while len(pairs) < repeats and sum(map(sum, pairs)) < LONGEST:
            pairs.append((seconds(call, None, backward), seconds(call, documents, backward)))
        row, packed = map(min, zip(*pairs))
        found[False][f"{what}_ms"], found[True][f"{what}_ms"] = 1e3 * row, 1e3 * packed
    return found


def make_document_rows(kind: str, name: str, found: dict[bool, dict[str, float]], origin: Origin) -> list[Row]:
    """The rows of an op or mixer ("ops", "mixers"): of one row of tokens, and of packed documents."""
    column = {"long": LONG, "short": SHORT, "heads": HEADS, "channels": CHANNELS}
    subject = {"op": name} if kind == "ops" else {}
    return [
        row
        for packed, values in found.items()
        for row in make_rows(
            TASK,
            origin,
            values,
            mixer=name if kind == "mixers" else None,
            column={**subject, **column, "packed": packed},
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that begin with one of these, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="result file of an earlier version")
    parser.add_argument("--output", type=Path, help=f"{RESULT.name} beside this script when all are measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    origin, rows = describe(), []
    for kind, names, make in (("ops", CASES, call_op), ("mixers", MIXERS, call_mixer)):
        for name in names:
            if not name.startswith(tuple(arguments.only.split(","))):
                continue
            found = measure(make(name), arguments.repeats)
            rows += make_document_rows(kind, name, found, origin)
            ratios = {what: found[True][what] / found[False][what] for what in found[True]}
            print(
                f"{name:44s} forward {found[True]['forward_ms']:8.0f} ms, {ratios['forward_ms']:5.2f} of the time of one row; "
                f"forward and backward {found[True]['training_ms']:8.0f} ms, {ratios['training_ms']:5.2f} of it",
                flush=True,
            )
    output = arguments.output or (None if arguments.only else RESULT)
    if output is not None:
        earlier = find_rows(arguments.before) if arguments.before else []
        rows += [dataclasses.replace(row, run={"before": True}) for row in earlier if not row.run]
        replace_rows(output, rows)
        print(f"written to {output}")


if __name__ == "__main__":
    main()
