"""Runs PTX of a few instructions on the CPU, by the warps of a cluster in a random order: some are slow, and what is sent arrives
late. Addresses in shared memory count from its start. CLUSTER bytes lie between the addresses of two programs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

CLUSTER = 1 << 20
ARITHMETIC = {
    "and.b32": lambda a, b: a & b, "shr.u32": lambda a, b: a >> b, "add.u32": lambda a, b: a + b,
    "add.f32": lambda a, b: a + b, "mul.lo.u32": lambda a, b: a * b, "mad.lo.u32": lambda a, b, c: a * b + c,
    "mapa.shared::cluster.u32": lambda a, program: a + CLUSTER * program, "selp.f32": lambda a, b, p: torch.where(p, a, b),
    "setp.eq.u32": torch.eq, "setp.ne.u32": torch.ne, "setp.lt.u32": torch.lt, "mov.u32": torch.clone,
    "mov.f32": torch.clone, "mov.b32": torch.clone,
}  # fmt: skip


class Barrier:
    """An mbarrier that waits for one thread, and for the bytes that the thread announces."""

    def __init__(self) -> None:
        self.phase, self.threads, self.bytes = 0, 1, 0

    def count(self, threads: int, size: int) -> None:
        self.threads -= threads
        self.bytes += size
        if self.threads == self.bytes == 0:
            self.phase, self.threads = self.phase + 1, 1


class Sent(NamedTuple):
    place: int
    numbers: Tensor
    barrier: int


class Cluster:
    """programs: of `warps` warps each, with `size` bytes of shared memory each."""

    def __init__(self, programs: int, warps: int, size: int = 4, seed: int = 0) -> None:
        self.programs, self.warps, self.random = programs, warps, random.Random(seed)
        self.memory = torch.full((programs, size // 4), torch.nan, dtype=torch.float64)
        self.barriers: dict[int, Barrier] = {}
        self.at_barrier: list[set[int]] = [set() for _ in range(programs)]
        self.arrived = [0] * (programs * warps)  # how often every warp arrived at the barrier of the cluster
        self.sent: list[Sent] = []

    def run(self, codes: list[str], given: list[dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
        """Every warp runs all codes, one after the other. given: registers before each code, [programs, warps, 32]. Returns the
        registers of every warp after each code."""
        lines = [
            [re.sub(r"^\w+:(?!:)", "", x.strip()).strip() for x in re.split(r"[;\n]", c.strip("{} \n"))] for c in codes
        ]
        lines = [[x for x in code if x and not x.startswith(".")] for code in lines]
        lane, warps = torch.arange(32), range(self.programs * self.warps)
        found: list[list[dict[str, Tensor]]] = [
            [
                {
                    "%tid.x": warp % self.warps * 32 + lane, "%laneid": lane, "%cluster_ctarank": lane * 0 + warp // self.warps,
                    **{name: x.reshape(-1, 32)[warp] for name, x in registers.items()},
                }
                for registers in given
            ]
            for warp in warps
        ]  # fmt: skip
        running = {warp: self.steps(warp, lines, found[warp]) for warp in warps}
        slow = self.random.sample(list(running), 2 if len(running) > 2 else 0)
        while running:
            if self.sent and self.random.random() < 0.2:
                self.deliver(self.sent.pop(self.random.randrange(len(self.sent))))
            warp = self.random.choice(list(running))
            if (warp not in slow or self.random.random() < 0.05) and next(running[warp], "ended") == "ended":
                del running[warp]
        assert not self.sent
        return found

    def deliver(self, sent: Sent) -> None:
        at = sent.place % CLUSTER // 4
        self.memory[sent.place // CLUSTER, at : at + len(sent.numbers)] = sent.numbers
        self.barrier(sent.barrier).count(0, -4 * len(sent.numbers))

    def barrier(self, place: int) -> Barrier:
        return self.barriers.setdefault(place, Barrier())

    def steps(self, warp: int, codes: list[list[str]], registers: list[dict[str, Tensor]]) -> Iterator[None]:
        for code, own in zip(codes, registers):
            for line in code:
                yield from self.step(line, warp, own)

    def step(self, text: str, warp: int, registers: dict[str, Tensor]) -> Iterator[None]:
        """Runs one instruction of all lanes. Other warps may run before one that has to do with memory."""
        program, chosen = warp // self.warps, torch.ones(32, dtype=torch.bool)
        if text.startswith("@"):
            predicate, text = text.split(None, 1)
            chosen = ~registers[predicate[2:]] if predicate[1] == "!" else registers[predicate[1:]]
        name, _, rest = text.partition(" ")
        operands = re.findall(r"(\[.*?\]|\{.*?\}|[^,\s]+)", rest)
        if name in ARITHMETIC:
            registers[operands[0]] = ARITHMETIC[name](*(value(x, registers) for x in operands[1:]))
        elif name.startswith("shfl.sync"):
            lane = torch.arange(32)
            source = lane ^ int(operands[2]) if "bfly" in name else lane * 0 + int(operands[2])
            registers[operands[0]] = value(operands[1], registers)[source]
        elif name.startswith("ld.shared"):
            yield
            at, names = address(operands[1], registers), re.findall(r"[^{},\s]+", operands[0])
            assert not (at % (4 * len(names))).any(), f"{text}: not aligned"
            registers |= {each: self.memory[program, at // 4 + i] for i, each in enumerate(names)}
        elif name.startswith("st."):
            yield
            at = address(operands[0], registers)
            numbers = torch.stack([value(x, registers) for x in re.findall(r"[^{},\s]+", operands[1])], 1)
            assert not (at[chosen] % (4 * numbers.shape[1])).any(), f"{text}: not aligned"
            if name.startswith("st.async"):
                barrier = address(operands[2], registers)
                assert (barrier // CLUSTER == at // CLUSTER)[chosen].all(), f"{text}: not the receiver's barrier"
                self.sent += [Sent(int(at[i]), numbers[i], int(barrier[i])) for i in chosen.nonzero().flatten()]
            else:
                receiver = at // CLUSTER if "::cluster" in name else torch.full((32,), program)
                for i in range(numbers.shape[1]):
                    self.memory[receiver[chosen], at[chosen] % CLUSTER // 4 + i] = numbers[chosen, i]
        elif name == "bar.sync":
            self.at_barrier[program].add(warp)
            while warp in self.at_barrier[program]:
                if len(self.at_barrier[program]) == self.warps:
                    self.at_barrier[program].clear()
                yield
        elif name.startswith("barrier.cluster.arrive"):
            self.arrived[warp] += 1
        elif name.startswith("barrier.cluster.wait"):
            while min(self.arrived) < self.arrived[warp]:
                yield
        elif name.startswith("mbarrier.arrive.expect_tx"):
            yield
            for place in address(operands[1], registers)[chosen].tolist():
                self.barrier(place + CLUSTER * program).count(1, int(operands[2]))
        elif name.startswith("mbarrier.try_wait"):
            barrier = self.barrier(int(address(operands[1], registers)[0]) + CLUSTER * program)
            while barrier.phase % 2 == int(value(operands[2], registers)[0]):
                yield
            registers[operands[0]] = chosen
        else:
            assert name == "bra" and not chosen.any(), text


def value(operand: str, registers: Mapping[str, Tensor]) -> Tensor:
    return registers[operand] if operand in registers else torch.full((32,), int(operand, 0))


def address(operand: str, registers: Mapping[str, Tensor]) -> Tensor:
    parts = re.fullmatch(r"\[(\S+)(?: \+ (\d+))?\]", operand)
    assert parts is not None, operand
    return value(parts[1], registers) + int(parts[2] or 0)
