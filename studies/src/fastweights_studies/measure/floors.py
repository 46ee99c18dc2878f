"""What forbids a kernel to be faster: the steps of a recursion that wait for each other, and bytes at the speed of a copy.

    python -m fastweights_studies.measure.floors
    python -m fastweights_studies.measure.floors --only vla --results runs/floors

Times, at 4 sequences of 2,048 tokens with 8 heads of 128 and of 64 channels, the kernels of floor_probes.py: as many programs
as an op has there, as many steps as its tokens or chunks need, and nothing else. What each assumes is printed beside its time.
Copies have as many bytes as the other launches of an op read and write, in as many launches. The sum of an op's parts is the
floor of every kernel of the form that they describe. Parts of "any form" no exact kernel avoids.

Writes studies/results/floors-<device>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastweights.kernels.sphere.rule import tile
from fastweights_studies.measure import floor_probes as probes
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import Work, as_graph, interleaved
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS

TASK = "floors"
HEADS, TOKENS = 32, 2048  # sequences times heads, tokens of a sequence
WIDTHS = (128, 64)


class Part(NamedTuple):
    """A part of an op's floor. of: ops. text: what it assumes. work: launches it."""

    of: tuple[str, ...]
    name: str
    text: str
    work: Work


ENCODE = ("lattice-encode", "lattice-similarity")
# Bytes in MB and launches of what is not in a chain of steps, forward and backward, at 128 channels, from the tensors of the
# launches. All but the state matrices of chunks halve at 64 channels, and these become a quarter; taken is a half for all.
COPIED = {
    "vla": (1840, 22),  # tokens, adjoints and gradients of all chunks 840; the memory with its write keys 1,000
    "ttt": (620, 9),
    "lattice-encode": (1100, 4),  # all but turn_slots and turn_slots_back
    "lattice-decode": (400, 1),  # the outputs
}


def fill(*shape: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 0.01) -> torch.Tensor:
    return (torch.rand(*shape, device=device) * scale).to(dtype)


def roots(kind: str, programs: int, device: str) -> Work:
    numbers, out = fill(8, 32, device=device, scale=1.0), fill(programs, 32, device=device)
    return lambda: probes.find_roots[(programs,)](numbers, out, TOKENS // 16, kind, num_warps=1)


def products(rows: int, K: int, tokens: int, inner: bool, device: str) -> Work:
    sixteen: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    programs = HEADS * K // rows
    keys, given, out = fill(tokens, K, **sixteen), fill(rows, tokens, **sixteen), fill(programs, rows, K, device=device)
    sizes = {"ROWS": rows, "K": K, "TOKENS": tokens, "INNER": inner}
    warps = 8 if rows * K > 8192 else 4
    return lambda: probes.multiply_in_turn[(programs,)](
        keys, given, out, TOKENS // tokens, **sizes, num_warps=warps, num_stages=1
    )


def slots(kernel: Any, K: int, each: int, rounds: int, device: str) -> Work:
    numbers, out, layout = fill(128, device=device, scale=0.1), fill(HEADS, 32 * 8, device=device), tile(K, K, each)
    return lambda: kernel[(HEADS,)](numbers, out, rounds, **layout)


def matrices(K: int, device: str, **parts: int) -> Work:
    kernel = probes.carry_matrix_alone if parts else probes.carry_adjoint_alone
    tokens, out = fill(K, K, device=device, dtype=torch.bfloat16), fill(HEADS, K, K, device=device)
    return lambda: kernel[(HEADS,)](tokens, out, TOKENS // 64, K=K, **parts, num_warps=8 if K > 64 else 4)


def copies(megabytes: float, launches: int, device: str) -> Work:
    """Launches that read half of the bytes and write the other half."""
    count = int(megabytes * 1e6 / launches / 8)
    sources, targets = ([fill(count, device=device) for _ in range(2)] for _ in range(2))

    def work() -> None:
        for i in range(launches):
            targets[i % 2].copy_(sources[i % 2])

    return work


def parts_of(K: int, device: str) -> Iterator[Part]:
    answers = partial(roots, "answers", HEADS, device)
    yield Part(("ttt",), "roots", "any form: one root per token follows from the one before", answers())
    for tokens in (16, 64):
        text = f"blocks of {tokens} tokens: four products that wait for each other, forward or backward"
        yield Part(("ttt",), f"products of {tokens} tokens", text, products(K, K, tokens, True, device))
    for name, kind in (("lattice-encode", "errors"), ("lattice-similarity", "keys")):
        text = "any form: one root per token and slot follows from the one before"
        yield Part((name,), "roots", text, roots(kind, HEADS * K // 32, device))
    for tokens in (16, 64):
        text = f"blocks of {tokens} tokens: two products with the state that wait for each other, forward or backward"
        yield Part(ENCODE, f"products of {tokens} tokens", text, products(64, K, tokens, False, device))
    text = "token after token on one multiprocessor per head, sums as layout.py takes them"
    yield Part(("lattice-decode",), "forward", text, slots(probes.write_slots_alone, K, 8, TOKENS // 2, device))
    yield Part(("lattice-decode",), "backward", text, slots(probes.undo_slots_alone, K, 4, TOKENS, device))
    for count in (1, 3):
        text = f"chunks of 64 tokens in turn, an inverse for nothing, {count} bfloat16 numbers for one in float32"
        yield Part(("vla",), f"matrix of {count}", text, matrices(K, device, PARTS=count))
    yield Part(("vla",), "adjoint", "chunks of 64 tokens in turn, two products", matrices(K, device))
    for name, (megabytes, launches) in COPIED.items():
        share = K / 128
        text = f"{megabytes * share:.0f} MB in {launches} launches, beside the launches that go in turn"
        yield Part((name,), "copies", text, copies(megabytes * share, launches, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops, comma-separated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    wanted, device = set(filter(None, asked.only.split(","))), find_gpu()
    path, origin = name_file(asked.results, TASK, device), describe(device)
    for K in WIDTHS:
        for part in parts_of(K, "cuda"):
            if wanted and not wanted & set(part.of):
                continue
            (time,) = interleaved({"": as_graph(part.work)}, asked.repeats).values()
            print(f"{K:4} {', '.join(part.of):36} {part.name:24} {1e3 * time.median:8.1f} us  {part.text}", flush=True)
            column = {"part": part.name.replace(" ", "-"), "heads": HEADS, "tokens": TOKENS, "channels": K}
            for op in part.of:
                replace_rows(path, make_rows(TASK, origin, {"device_ms": time}, column={"op": op, **column}))


if __name__ == "__main__":
    main()
