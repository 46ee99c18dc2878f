"""Whether a reduction whose steps do not commute runs in order.

Triton combines the numbers of a thread in order. Between threads it combines pairs in either order, which is right only for
steps that commute. Those of more than one tensor, such as f s + x, do not.
"""

from __future__ import annotations

import re

LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{.*threadsPerWarp = \[([\d, ]+)\], warpsPerCTA = \[([\d, ]+)\]", re.MULTILINE
)
REDUCTION = re.compile(r'"tt\.reduce"\(%[\w:#]+, .*axis = (\d+)')
RESULT = re.compile(r"^\s*\}\) : \(tensor<[^,>]+, (#\w+)>")


def disordered_reductions(ttgir: str) -> list[str]:
    """Reductions of several tensors, of a kernel in Triton's GPU dialect, along an axis that lies across threads."""
    threads = {name: [int(x) for x in of_warp.split(",")] for name, of_warp, _ in LAYOUT.findall(ttgir)}
    warps = {name: [int(x) for x in of_program.split(",")] for name, _, of_program in LAYOUT.findall(ttgir)}
    found, axis = [], None
    for line in ttgir.splitlines():
        if start := REDUCTION.search(line):
            axis = int(start[1])
        elif axis is not None and (end := RESULT.match(line)):
            if end[1] not in threads or threads[end[1]][axis] * warps[end[1]][axis] > 1:
                found.append(f"axis {axis} of a tile in layout {end[1]}")
            axis = None
    return found
