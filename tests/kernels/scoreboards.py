"""Whether machine code reads a register before the load that fills it has ended, or writes one that a product still reads.

An instruction of Volta and later GPUs names in its upper bits the scoreboard, one of six, that it holds until its result is
there, and the scoreboards that it waits for. The assembler has to set both. Loads from shared memory and shuffles end in the
order in which they begin: a wait for one is a wait for those before it. Straight-line code is judged: nothing is known at a
jump's target.

A product of a warpgroup goes on while what stands behind it runs, until it is waited for, and reads its left operand on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

IN_ORDER = ("LDS", "LDSM", "SHFL")
OTHER_LOADS = ("LDG", "LDL")
WITHOUT_RESULT = ("STS", "STSM", "STG", "STL", "LDGSTS", "BAR", "HGMMA")
SCOREBOARDS = 6  # 7 in the field of the one that is held: none
BITS = r"\s+/\* 0x([0-9a-f]{16}) \*/"
LINE = re.compile(rf"\s+/\*([0-9a-f]{{4,}})\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?)\s*;{BITS}\n{BITS}")
WIDE = re.compile(r"CS2R(?!\.32)|IMAD\.WIDE")  # write two registers
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
JUMP = re.compile(r"(?:BRA|BSSY)\b.* 0x([0-9a-f]+)")


class Instruction(NamedTuple):
    """Its place, its text without a predicate, the scoreboard that it holds, and a bit for each that it waits for."""

    place: int
    text: str
    held: int
    waits: int

    @property
    def name(self) -> str:
        return re.split(r"[. ]", self.text, maxsplit=1)[0]

    @property
    def operands(self) -> list[str]:
        return [x.strip() for x in self.text.partition(" ")[2].split(",")]

    @property
    def width(self) -> int:
        """Registers of what is loaded or stored."""
        code = self.text.split(" ")[0]
        return 4 if re.search(r"\.128|M88\.4", code) else 2 if re.search(r"\.64|M88\.2", code) else 1

    @property
    def is_load(self) -> bool:
        return self.name in IN_ORDER + OTHER_LOADS

    @property
    def written(self) -> set[int]:
        operand = self.operands[1] if self.name == "SHFL" else self.operands[0]
        found = re.match(r"R(\d+)", operand)
        if found is None or self.name in WITHOUT_RESULT:
            return set()
        return {int(found[1]) + i for i in range(self.width if self.is_load else 2 if WIDE.match(self.text) else 1)}

    @property
    def read(self) -> set[int]:
        operands = self.operands
        if self.name == "HGMMA":  # the sums are waited for by other means
            left = re.match(r"R(\d+)", operands[1])
            return {int(left[1]) + i for i in range(4)} if left else set()
        sources = operands[1 + (self.name == "SHFL") :] if self.written else operands
        found: set[int] = set()
        for register, pair in re.findall(r"\bR(\d+)(\.64)?\b", ",".join(sources)):
            found |= {int(register), int(register) + bool(pair)}
        stored = re.match(r"R(\d+)", operands[-1])
        if stored and self.name in ("STS", "STSM", "STG", "STL"):
            found |= {int(stored[1]) + i for i in range(self.width)}
        return found


def read_instructions(sass: str) -> list[Instruction]:
    """Of what `cuobjdump -sass` prints."""
    found = []
    for place, text, _, code in LINE.findall(sass):
        control = int(code, 16) >> 41
        found.append(Instruction(int(place, 16), re.sub(r"\s+", " ", text), control >> 5 & 7, control >> 11 & 63))
    return found


def early_reads(instructions: Sequence[Instruction]) -> list[str]:
    """Instructions that read what may not be there yet, as 'instruction: load'."""
    targets = {int(jump[1], 16) for one in instructions if (jump := JUMP.match(one.text))}
    pending: dict[int, tuple[bool, int]] = {}  # register -> whether its load is one of those in order, and its number
    held: list[list[tuple[bool, int]]] = [[] for _ in range(SCOREBOARDS)]
    wrong = []
    for number, one in enumerate(instructions):
        if one.place in targets:
            pending = {}
        for board in range(SCOREBOARDS):
            if one.waits >> board & 1:
                last = max((load for in_order, load in held[board] if in_order), default=-1)
                ended = {load for in_order, load in held[board] if not in_order}
                pending = {
                    register: (in_order, load)
                    for register, (in_order, load) in pending.items()
                    if (load > last if in_order else load not in ended)
                }
                held[board] = []
        wrong += [f"{one.text}: {instructions[pending[register][1]].text}" for register in one.read & pending.keys()]
        for register in one.written:
            pending.pop(register, None)
            if one.is_load:
                pending[register] = (one.name in IN_ORDER, number)
        if one.is_load and one.held < SCOREBOARDS:
            held[one.held].append((one.name in IN_ORDER, number))
    return wrong


def late_writes(instructions: Sequence[Instruction]) -> list[str]:
    """Instructions that write a register of the left operand of a product that may still run, as 'instruction: product'."""
    groups: list[list[Instruction]] = [[]]  # products that are waited for together; the last is not complete
    wrong = []
    for one in instructions:
        if one.name == "HGMMA":
            groups[-1].append(one)
            if one.operands[-1] == "gsb0":
                groups.append([])
        elif wait := WAIT.match(one.text):
            groups = groups[-1 - int(wait[1], 16) :]
        else:
            wrong += [f"{one.text}: {each.text}" for group in groups for each in group if one.written & each.read]
    return wrong


def register_hazards(sass: str) -> list[str]:
    """Early reads and late writes in what `cuobjdump -sass` prints."""
    instructions = read_instructions(sass)
    return early_reads(instructions) + late_writes(instructions)
