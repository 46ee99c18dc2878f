"""The parts of docs/performance.md about the kernels: times beside the peers, one token, first calls, errors, checks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from fastweights_studies.measure.judge.peers import GUARDED
from fastweights_studies.measure.judge.records import (
    describe_failure,
    measured_with_an_op,
    sizes_in,
    worst_errors,
)
from fastweights_studies.pages.rendering import describe_origins, lines, number, short_commit, table
from fastweights_studies.pages.results import value_of
from fastweights_studies.record import Origin, Plain, Row, select

__all__ = ["OPS", "STAGES", "against_page", "checks_page", "fused_page", "packed_page", "times_page"]

STAGES = {"forward": "forward", "forward_backward": "forward + backward"}

OPS = {
    "linear": "`linear_attention` without decay; peer `simple_gla`",
    "simple_gla": "`linear_attention`, one decay per head; peer `simple_gla`",
    "gla": "`linear_attention`, one decay per key channel; peer `gla`",
    "deltanet": "`delta_rule` without decay; peer `delta_rule`",
    "gdn": "`delta_rule`, one decay per head; peer `gated_delta_rule`",
    "gdn-write": "`delta_rule`, one decay per head, a write key of its own; beside it with tied keys (read and written)",
    "kda": "`delta_rule`, one decay per key channel; peer `kda`",
    "pgdn": "`preconditioned_delta_rule`, one decay per head; peer `precond_gated_delta_rule`",
    "pkda": "`preconditioned_delta_rule`, one decay per key channel; peer `precond_kda`, which also normalizes q and k",
    "mesa": "`mesa`, 30 iterations; peer `mesa_net`",
    "gka": "`gated_kalmanet`, 30 Chebyshev iterations; without a peer",
    "longhorn-elementwise": "`elementwise_longhorn`, without a peer; its floor is 7 float32 operations per element and token, 14 "
    "backwards",
    "palimpsa": "`palimpsa`, without a peer; its floor is 9 float32 operations per element and token, 18 backwards",
    **{
        f"lattice-{objective}": f"`lattice`, objective {objective}, with a decay, without a peer. Its floor: float32 operations "
        "at the full rate; decode is sequential in tokens"
        for objective in ("decode", "encode", "similarity")
    },
    "ttt": "`output_normalized_ttt`; without a peer",
    "vla": "`variational_linear_attention`, refresh every 20 tokens; without a peer",
    "rls": "`recursive_least_squares` without decay; without a peer",
}


def join_errors(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {x:.1e}" for name, x in errors.items())


@dataclass
class Timed:
    """What the judge found of an op at one size: in one call, of one decoded token, or at a first call."""

    op: str
    size: str
    rows: list[Row] = field(default_factory=list)

    def time(self, stage: str, peer: str | None = None, *, replayed: bool = True) -> float | None:
        """Milliseconds on the device, or of the call from Python; peer: None for ours."""
        return value_of(self.rows, f"{stage}_ms", column={"peer": peer, "replayed": replayed})

    def has(self, stage: str) -> bool:
        return self.time(stage) is not None

    def ours(self, stage: str, *, replayed: bool = True) -> float:
        found = self.time(stage, replayed=replayed)
        assert found is not None
        return found

    def megabytes(self, stage: str, peer: str | None = None) -> float | None:
        found = value_of(self.rows, f"{stage}_peak_bytes", column={"peer": peer})
        return None if found is None else found / 2**20

    def failures(self) -> str:
        return "; ".join(describe_failure(row) for row in select(self.rows, measure="failure"))

    def time_cells(self, stage: str, mark: str = "") -> list[str]:
        """Device ours, peer, peer / ours; eager the same."""
        cells = []
        for replayed in (True, False):
            ours, peer = self.ours(stage, replayed=replayed), self.time(stage, "fla", replayed=replayed)
            ratio = "–" if peer is None else f"{peer / ours:.2f}"
            cells += [number(ours), number(peer) + (mark if peer else ""), ratio]
        return cells

    def floor_cells(self, stage: str) -> list[str]:
        floor = value_of(self.rows, f"{stage}_floor_ms")
        assert floor is not None
        return [number(floor), f"{floor / self.ours(stage):.0%}"]


CALL, DECODE, FIRST_CALL = "call", "decode", "first call"  # kinds of what is timed
Ops = dict[str, list[Timed]]


def kind_of(row: Row) -> str:
    return FIRST_CALL if "cached" in row.column else DECODE if "in_place" in row.column else CALL


def name_row(row: Row) -> str:
    """The op, what was timed of it, and the size, as commands and tables name it."""
    kind = kind_of(row)
    return " ".join([str(row.column["op"]), *([] if kind == CALL else [kind]), str(sizes_in(row.column))])


def by_op(rows: Sequence[Row], kind: str) -> Ops:
    """What was timed of every op, in the order of OPS."""
    found: dict[str, dict[Hashable, Timed]] = {op: {} for op in OPS}
    for row in rows:
        if kind_of(row) == kind:
            op = str(row.column["op"])
            made = Timed(op, str(sizes_in(row.column)))
            found.setdefault(op, {}).setdefault(measured_with_an_op(row), made).rows.append(row)
    return {op: list(sizes.values()) for op, sizes in found.items() if sizes}


def op_section(op: str, sizes: Sequence[Timed]) -> str:
    rows, beside, refused = [], [], []
    for timed in sizes:
        if why := timed.failures():
            refused.append(f"({timed.size}): no time, {why}.\n")
            continue
        for stage, title in STAGES.items():
            if not timed.has(stage):
                continue
            mark = "†" if stage == "forward_backward" and op in GUARDED else ""
            rows.append(
                [
                    f"({timed.size})",
                    title,
                    *timed.time_cells(stage, mark),
                    number(timed.time(stage, "sdpa")),
                    *(number(timed.megabytes(stage, peer)) for peer in (None, "fla")),
                    *timed.floor_cells(stage),
                ]
            )
            tied = timed.time(stage, "tied")
            if tied is not None:
                cost = f"a write key of its own costs {timed.ours(stage) / tied - 1:.1%}"
                beside.append(f"- ({timed.size}) {title}: {number(tied)} device time with tied keys; {cost}.")
    if not rows and not refused:
        return ""
    head = [
        "size", "pass", "device", "peer", "peer / ours", "eager", "peer", "peer / ours", "SDPA device", "MB", "peer MB",
        "floor", "reached",
    ]  # fmt: skip
    return "\n".join([f"### {op}\n", f"{OPS[op]}.\n", *([table(head, rows)] if rows else []), *lines(beside), *refused])


def summary_section(ops: Ops) -> str:
    """Forward + backward at the first and the last of the sizes at which every op with a peer is timed."""
    stage = "forward_backward"
    timed = {
        op: {one.size: one for one in sizes if one.time(stage, "fla") is not None and one.has(stage)}
        for op, sizes in ops.items()
    }
    timed = {op: sizes for op, sizes in timed.items() if sizes}
    shared = [size for size in next(iter(timed.values()), {}) if all(size in sizes for sizes in timed.values())]
    if not shared:
        return ""

    def cell(one: Timed, *, replayed: bool = True) -> str:
        mark = "†" if one.op in GUARDED else ""
        ours, peer = one.ours(stage, replayed=replayed), one.time(stage, "fla", replayed=replayed)
        assert peer is not None
        return f"{number(ours)} / {number(peer)}{mark} = {ours / peer:.2f}"

    def memory(one: Timed) -> str:
        ours, peer = one.megabytes(stage), one.megabytes(stage, "fla")
        return "–" if ours is None or peer is None else f"{ours / peer:.2f}"

    first, last = shared[0], shared[-1]
    rows = [
        [op, cell(sizes[first]), cell(sizes[first], replayed=False), cell(sizes[last]), memory(sizes[last])]
        for op, sizes in timed.items()
    ]
    head = ["op", f"device, ({first})", f"eager, ({first})", f"device, ({last})", f"memory, ({last})"]
    return "\n".join(["### Forward + backward, ours / peer\n", table(head, rows)])


def decode_section(ops: Ops) -> str:
    rows, refused = [], []
    for op, sizes in ops.items():
        for timed in sizes:
            if why := timed.failures():
                refused.append(f"{op}: no time, {why}.\n")
                continue
            kind = "in place" if timed.rows[0].column["in_place"] else "new states"
            rows.append([op, f"({timed.size})", kind, *timed.time_cells("decode"), *timed.floor_cells("decode")])
    if not rows and not refused:
        return ""
    head = ["op", "size", "states", "device", "peer", "peer / ours", "eager", "peer", "peer / ours", "floor", "reached"]
    text = "### One token at a time\n\nThe floor is the states read and written once.\n"
    return "\n".join([text, *([table(head, rows)] if rows else []), *refused])


def cold_section(ops: Ops) -> str:
    rows = [
        [
            op,
            f"({timed.size})",
            *(number(value_of(timed.rows, "first_call_s", column={"cached": cached})) for cached in (False, True)),
            str(timed.rows[0].run.get("processes", 1)),
        ]
        for op, sizes in ops.items()
        for timed in sizes
    ]
    if not rows:
        return ""
    text = (
        "### First call\n\nSeconds of the first forward + backward of a new process. *processes*: of this op and others that\n"
        "compile at once, which takes longer than one alone.\n"
    )
    return "\n".join([text, table(["op", "size", "empty kernel cache", "kernels cached", "processes"], rows)])


def error_section(rows: Sequence[Row]) -> str:
    """Of the timed sizes: the largest error of every result, ours, the twin's and the peer's."""
    whose = {None: "ours", "twin": "twin", "fla": "peer"}
    worst: dict[str, dict[str, dict[str, float]]] = {op: {who: {} for who in whose.values()} for op in OPS}
    for row in select(rows, measure="error"):
        if row.column["peer"] in whose:
            largest = worst[str(row.column["op"])][whose[row.column["peer"]]]
            error, result = math.nan if row.value is None else row.value, str(row.column["result"])
            largest[result] = max(error, largest.get(result, 0.0))
    shown = [[op, who, join_errors(errors)] for op, of_op in worst.items() for who, errors in of_op.items() if errors]
    if not shown:
        return ""
    text = (
        "### Errors at these sizes\n\n"
        "RMS of the difference from float64 over RMS of the reference, the largest over the sizes, d for a gradient; ours also\n"
        "with initial and final states. The twin is the same computation in PyTorch with the operands of matrix products\n"
        "rounded to the input dtype.\n"
    )
    return "\n".join([text, table(["op", "whose", "largest errors"], shown)])


def times_page(rows: Sequence[Row], ceilings: Sequence[Row], device: str) -> str:
    calls = by_op(rows, CALL)
    dtype, backend = (rows[0].column[name] for name in ("dtype", "backend"))
    copy, product = (value_of(ceilings, f"{what}_per_second") for what in ("copy_bytes", "product_operations"))
    reached = (
        f" Ceilings: copy {copy / 1e12:.2f} TB/s, bf16 matrix product {product / 1e12:.0f} TFLOP/s."
        if copy and product
        else ""
    )
    origins = describe_origins(rows, measured_with_an_op, name_row)
    parts = [
        f"## {device}, {dtype}\n",
        f"{origins}{reached} Backend of ours: {backend}.\n",
        summary_section(calls),
        *(op_section(op, sizes) for op, sizes in calls.items()),
        decode_section(by_op(rows, DECODE)),
        cold_section(by_op(rows, FIRST_CALL)),
        error_section(rows),
    ]
    return "\n".join(part for part in parts if part)


def checks_page(rows: Sequence[Row], device: str) -> str:
    passing = select(rows, measure="passes")
    text = (
        f"## Correctness, {device}\n\n{describe_origins(rows, measured_with_an_op)} "
        f"{sum(bool(row.value) for row in passing)} of {len(passing)} combinations of op, "
        "length, head size, dtype, decay\nand packing pass: errors against float64 within budget and within twice the twin's, "
        "and the same bits in two runs. The\nlargest error of every result:\n"
    )
    worst = [[op, precision, join_errors(errors)] for (op, precision), errors in worst_errors(rows).items()]
    parts = [text, table(["op", "inputs", "largest errors"], sorted(worst, key=lambda line: list(OPS).index(line[0])))]
    failed: dict[str, list[str]] = {}
    for row in select(rows, measure="failure"):
        failed.setdefault(name_combination(row.column), []).append(describe_failure(row))
    if failed:
        parts.append("Not passing:\n")
        parts.append("".join(f"- {what}: {'; '.join(why)}\n" for what, why in failed.items()))
    return "\n".join(parts)


def name_combination(column: Mapping[str, Plain]) -> str:
    packed = " packed" * bool(column["packed"])
    return f"{column['op']} ({sizes_in(column)}) {column['dtype']} {column['decay']} decay{packed}"


def fused_page(rows: Sequence[Row], device: str) -> str:
    """What surrounds the memories, by op and size; ours beside whatever else was timed."""
    lines = []

    def size_of(row: Row) -> tuple[Plain, ...]:
        return tuple(row.column[name] for name in ("op", "batch", "length"))

    for op, batch, length in dict.fromkeys(map(size_of, rows)):
        own = select(rows, column={"op": op, "batch": batch, "length": length})
        for stage, title in STAGES.items():
            cells = []
            for replayed in (True, False):
                timed = select(own, measure=f"{stage}_ms", column={"replayed": replayed})
                cells.append(", ".join(f"{row.column['peer'] or 'ours'} {number(row.value)}" for row in timed))
            if any(cells):
                lines.append([f"{op} {batch}x{length}", title, *cells])
    origins = describe_origins(rows, size_of, lambda row: "{} {}x{}".format(*size_of(row)))
    text = f"## Around the memories, {device}\n\n{origins}\n"
    return "\n".join([text, table(["what", "pass", "device", "eager"], lines)])


def name_base(origin: Origin) -> str:
    """The commit of the other checkout; of a copy without git, the hash of its files."""
    if origin.commit == "unknown":
        return f"files {origin.versions['files']}"
    return f"commit {short_commit(origin)}"


def against_page(rows: Sequence[Row], device: str) -> str:
    """Device time and memory beside another checkout."""
    lines = []
    for after in select(rows, measure="device_ms", column={"checkout": "after"}):
        column = {name: value for name, value in after.column.items() if name != "checkout"}
        found = {
            (which, measure): value_of(rows, measure, column={**column, "checkout": which})
            for which in ("before", "after")
            for measure in ("device_ms", "peak_bytes")
        }
        cells = []
        for measure, scale in (("device_ms", 1), ("peak_bytes", 2**20)):
            new, old = found["after", measure], found["before", measure]
            assert new is not None and old is not None
            cells += [number(old / scale), number(new / scale), f"{new / old if old else 1.0:.3f}"]
        lines.append([str(column["op"]), f"({sizes_in(column)})", STAGES[str(column["stage"])], *cells])
    here = select(rows, column={"checkout": "after"})
    (base,) = dict.fromkeys(name_base(row.origin) for row in select(rows, column={"checkout": "before"}))
    text = (
        f"## Against {base}, {device}, {rows[0].column['dtype']}\n\n"
        f"{describe_origins(here, measured_with_an_op)} Device time and memory of ours, before and after, in one run; "
        "`kernels.py --against`.\n"
    )
    head = ["op", "size", "pass", "before", "after", "after / before", "MB before", "MB after", "after / before"]
    return "\n".join([text, table(head, lines)])


def packed_page(rows: Sequence[Row], device: str) -> str:
    """Eager calls with one cu_seqlens that stays and with a new one per call."""
    lines = []
    for same in select(rows, column={"changing": False}):
        new = value_of(rows, same.measure, column={**same.column, "changing": True})
        assert new is not None and same.value is not None
        ratio = f"{new / same.value:.2f}"
        lines.append([str(same.column["op"]), f"({sizes_in(same.column)})", number(same.value), number(new), ratio])
    text = (
        f"## Packed sequences, {device}\n\n{describe_origins(rows, measured_with_an_op)} Forward + backward called eagerly, "
        f"{rows[0].column['sequences']} sequences per row; `packed.py`.\n"
    )
    head = ["op", "size", "one cu_seqlens", "new cu_seqlens per call", "ratio"]
    return "\n".join([text, table(head, lines)])
