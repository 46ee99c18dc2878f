"""What documents of very different lengths cost on a CPU: one of 4,096 tokens packed beside 1,024 of one token, against one row
of as many tokens. Every op in every form that its declaration lists, and every mixer; float32, the shortest time of one
processor, both rows in turn.

    python -m fastweights_studies.measure.packed_documents                all, writes studies/results/packed_documents.json
    python -m fastweights_studies.measure.packed_documents --only delta_rule,gdn  names that begin so; writes with --output only
    python -m fastweights_studies.measure.packed_documents --before FILE  with the ratios of an earlier result file beside its own
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fastweights.layers import MIXERS, build_mixer
from fastweights.testing import CASES
from fastweights_studies.measure.environment import describe, write_json
from fastweights_studies.places import RESULTS

RESULT = RESULTS / "packed_documents.json"
LONG, SHORT = 4096, 1024
HEADS, CHANNELS = 4, 32
LONGEST = 10.0  # seconds, after which a call is not repeated
Call = Callable[[Tensor | None], Tensor]


def of_op(name: str) -> Call:
    case = CASES[name]
    sizes = {"batch": 1, "time": LONG + SHORT, "heads": HEADS, "key": CHANNELS, "value": CHANNELS}
    inputs = case.draw(**sizes, dtype=torch.float32).map(lambda x: x.requires_grad_())
    options = {**case.measured, "backend": "torch", "output_final_state": False}
    return lambda cu_seqlens: case(inputs, cu_seqlens=cu_seqlens, **options)[0]


def of_mixer(name: str) -> Call:
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


def measure(call: Call, repeats: int) -> dict[str, float]:
    documents = torch.tensor([0, *range(LONG, LONG + SHORT + 1)])
    seconds(call, documents[:2] * (LONG + SHORT) // LONG, True)  # buffers that stay
    found = {}
    for what, backward in (("forward", False), ("training", True)):
        pairs: list[tuple[float, float]] = []
        while len(pairs) < repeats and sum(map(sum, pairs)) < LONGEST:
            pairs.append((seconds(call, None, backward), seconds(call, documents, backward)))
        row, packed = map(min, zip(*pairs))
        found |= {f"{what}_row_ms": 1e3 * row, f"{what}_packed_ms": 1e3 * packed, f"{what}_ratio": packed / row}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that begin with one of these, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="result file of an earlier version")
    parser.add_argument("--output", type=Path, help=f"{RESULT.name} beside this script when all are measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for kind, names, make in (("ops", CASES, of_op), ("mixers", MIXERS, of_mixer)):
        rows[kind] = {}
        for name in names:
            if not name.startswith(tuple(arguments.only.split(","))):
                continue
            row = rows[kind][name] = measure(make(name), arguments.repeats)
            print(
                f"{name:44s} forward {row['forward_packed_ms']:8.0f} ms, {row['forward_ratio']:5.2f} of the time of one row; "
                f"forward and backward {row['training_packed_ms']:8.0f} ms, {row['training_ratio']:5.2f} of it",
                flush=True,
            )
    output = arguments.output or (None if arguments.only else RESULT)
    if output is not None:
        sizes = {"long": LONG, "short": SHORT, "heads": HEADS, "channels": CHANNELS}
        write_json(output, {**describe(), "sizes": sizes, **rows, **({"before": before} if before else {})})
        print(f"written to {output}")


if __name__ == "__main__":
    main()
