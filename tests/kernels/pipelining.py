"""Whether a pipelined loop copies into a buffer that a product of an earlier statement may still read.

Triton's software pipeliner copies the tiles of later steps into shared memory while products of this step run. A product on
Hopper is asynchronous: `warp_group_dot_wait {pendings = n}` leaves the last n running. A copy that follows such a wait must
therefore not write to a buffer that one of them reads, which it does where a tile has only as many buffers as steps are copied
ahead.
"""

from __future__ import annotations

import re

BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
COPY = re.compile(r"ttg\.async_copy_global_to_local %\w+, (%\w+)")
PRODUCT = re.compile(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+)")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def overwritten_operands(ttgir: str) -> list[str]:
    """Products of a kernel in Triton's GPU dialect whose operand a copy may overwrite, as 'product: tile'."""
    lines = ttgir.splitlines()
    buffers = {found[1]: int(found[2]) for line in lines if (found := BUFFERS.search(line))}
    viewed = {found[1]: found[2] for line in lines if (found := VIEW.search(line))}

    def tile(name: str) -> str:
        while name in viewed:
            name = viewed[name]
        return name

    copied_ahead: dict[str, int] = {}
    running: list[tuple[str, set[str]]] = []
    wrong: list[str] = []
    loop: int | None = None  # indent of the loop that a line stands in
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if " = scf.for " in line:
            loop, running = indent, []
        elif loop is not None and indent <= loop and line.strip().startswith("}"):
            loop, copied_ahead = None, {}
        elif found := COPY.search(line):
            name = tile(found[1])
            if loop is None:
                copied_ahead[name] = copied_ahead.get(name, 0) + 1
            elif buffers.get(name, 0) <= copied_ahead.get(name, 0):
                wrong += [f"{product}: {name}" for product, operands in running if name in operands]
        elif loop is not None and (found := PRODUCT.search(line)):
            running.append((found[1], {tile(found[2]), tile(found[3])}))
        elif loop is not None and (found := WAIT.search(line)):
            running = running[len(running) - int(found[1]) :]
    return wrong
