"""The assembly (PTX) of the exchanges of exchanges.py and of sums over the lanes of a warp.

Sizes: K slots, K / 32 warps per program, PARTS programs per cluster. SUMS: sums over channels that all warps get, each K numbers.
OWNED: sums over channels of which every program gets those of its own K / PARTS slots. MBARRIER: the way to send.
"""

from __future__ import annotations

from fastweights.kernels.runtime.gluon import gluon


@gluon.constexpr_function
def exchange_places(K, PARTS, SUMS, OWNED):
    """The memory of the exchanges of a program, in bytes: the size of its warps' parts, then the places of what arrives: sums,
    |h|^2 and owned sums, then the place of the mbarriers and the size of it all."""
    local = K // 32 * (SUMS + OWNED) * K * 4
    arriving = 2 * (local + 16)  # the warps' parts of |h|^2 come last
    squares = arriving + 2 * PARTS * SUMS * K * 4
    owned = squares + 2 * PARTS * 4
    barriers = (owned + 2 * OWNED * K * 4 + 15) // 16 * 16
    return local, arriving, squares, owned, barriers, barriers + 16


@gluon.constexpr_function
def vector(names):
    return (f".v{len(names)}", "{" + ", ".join(names) + "}") if len(names) > 1 else ("", names[0])


@gluon.constexpr_function
def begin_code(K, PARTS, SUMS, OWNED):
    """Reserves the memory of the exchanges and puts its address into $0."""
    *_, barriers, end = exchange_places(K, PARTS, SUMS, OWNED)
    return f"""{{
        .reg .pred p; .reg .b32 t;
        .shared .align 16 .b8 exchanged[{end}];
        mov.u32 $0, exchanged;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p mbarrier.init.shared::cta.b64 [$0 + {barriers}], 1;
        @p mbarrier.init.shared::cta.b64 [$0 + {barriers + 8}], 1;
        @p fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
    }}"""


@gluon.constexpr_function
def load_code(names, address):
    kind, group = vector(names)
    return f"ld.shared{kind}.f32 {group}, [{address}];"


@gluon.constexpr_function
def sum_code(names):
    """Adds pairs, then their sums, and so on. The first register gets the sum."""
    lines = []
    while len(names) > 1:
        half = len(names) // 2
        lines += [f"add.f32 {names[i]}, {names[2 * i]}, {names[2 * i + 1]};" for i in range(half)]
        names = names[:half]
    return "\n".join(lines)


@gluon.constexpr_function
def scope(names, lines):
    """The lines with registers of their own: those named, and those that both halves of an exchange need."""
    head = f""".reg .pred chosen; .reg .f32 {", ".join(names)};
        .reg .b32 area, thread, lane, warp, rank, buffer, phase, barrier, own, at, to, there, meeting, program, kind, slot;"""
    return "{\n" + "\n".join([head, *lines]) + "\n}"


@gluon.constexpr_function
def exchange_head(area, number, barriers):
    return [
        f"mov.u32 area, ${area}; mov.u32 thread, %tid.x; and.b32 lane, thread, 31; and.b32 buffer, ${number}, 1;",
        f"mad.lo.u32 barrier, buffer, 8, area; add.u32 barrier, barrier, {barriers};",
    ]


@gluon.constexpr_function
def send_code(K, PARTS, SUMS, OWNED, MBARRIER):
    """The first half of an exchange. Inputs, K / 32 per thread: parts of the sums, of the owned sums and of |h|^2, the address of
    the memory, and the number of the exchange. Every thread gets all sums, but one of the owned sums only. The outputs, which
    come first, are zeros: Triton wants outputs."""
    slots, warps, each, width = K // 32, K // 32, SUMS + OWNED, K // PARTS
    local, arriving, squares, owned, barriers, _ = exchange_places(K, PARTS, SUMS, OWNED)
    square = slots + each * slots
    lines = exchange_head(square + slots, square + 2 * slots, barriers)

    def send(names, program, predicate=""):
        kind, group = vector(names)
        lines.append(f"mapa.shared::cluster.u32 there, to, {program};")
        if MBARRIER:
            lines.append(f"mapa.shared::cluster.u32 meeting, barrier, {program};")
            name = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
            lines.append(f"{predicate} {name}{kind}.f32 [there], {group}, [meeting];")
        else:
            lines.append(f"{predicate} st.shared::cluster{kind}.f32 [there], {group};")

    # The parts of this warp.
    lines.append("shr.u32 warp, thread, 5; mov.u32 rank, %cluster_ctarank; setp.eq.u32 chosen, lane, 0;")
    lines.append(f"mad.lo.u32 own, buffer, {local + 16}, area;")
    lines.append(f"mad.lo.u32 at, warp, {each * K * 4}, own; mad.lo.u32 at, lane, {4 * slots}, at;")
    for i in range(each):
        kind, group = vector([f"${slots + i * slots + r}" for r in range(slots)])
        lines.append(f"st.shared{kind}.f32 [at + {i * K * 4}], {group};")
    lines.append(f"mad.lo.u32 at, warp, 4, own; @chosen st.shared.f32 [at + {local}], ${square};")
    lines.append(f"bar.sync 1, {32 * warps};")
    if MBARRIER:
        arriving_bytes = PARTS * (SUMS * K + 1 + OWNED * width) * 4
        lines.append("setp.eq.u32 chosen, thread, 0;")
        lines.append(f"@chosen mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], {arriving_bytes};")
    # A thread adds SUMS neighbours of [SUMS, K], for all programs.
    lines.append(f"mad.lo.u32 at, thread, {4 * SUMS}, own;")
    lines += [load_code([f"x{w}_{i}" for i in range(SUMS)], f"at + {w * each * K * 4}") for w in range(warps)]
    lines += [sum_code([f"x{w}_{i}" for w in range(warps)]) for i in range(SUMS)]
    lines.append(f"mad.lo.u32 to, buffer, {PARTS * SUMS * K * 4}, area; mad.lo.u32 to, rank, {SUMS * K * 4}, to;")
    lines.append(f"mad.lo.u32 to, thread, {4 * SUMS}, to; add.u32 to, to, {arriving};")
    for program in range(PARTS):
        send([f"x0_{i}" for i in range(SUMS)], program)
    # |h|^2, by a thread for each program.
    names = [f"y{w}" for w in range(warps)]
    lines += [load_code(names, f"own + {local}"), sum_code(names)]
    lines.append(f"mad.lo.u32 to, buffer, {PARTS * 4}, area; mad.lo.u32 to, rank, 4, to; add.u32 to, to, {squares};")
    lines.append(f"setp.lt.u32 chosen, thread, {PARTS}; and.b32 program, thread, {PARTS - 1};")
    send(["y0"], "program", "@chosen")
    if OWNED:
        # OWNED neighbours of [OWNED, K], for the program that has their slots.
        lines.append(f"mad.lo.u32 at, thread, {4 * OWNED}, own;")
        lines += [
            load_code([f"z{w}_{i}" for i in range(OWNED)], f"at + {(w * each + SUMS) * K * 4}") for w in range(warps)
        ]
        lines += [sum_code([f"z{w}_{i}" for w in range(warps)]) for i in range(OWNED)]
        lines.append(
            f"mul.lo.u32 at, thread, {OWNED}; shr.u32 kind, at, {K.bit_length() - 1}; and.b32 slot, at, {K - 1};"
        )
        lines.append(f"shr.u32 program, slot, {width.bit_length() - 1}; and.b32 slot, slot, {width - 1};")
        lines.append(f"mad.lo.u32 to, buffer, {PARTS * OWNED * width * 4}, area; add.u32 to, to, {owned};")
        lines.append(f"mad.lo.u32 to, rank, {OWNED * width * 4}, to; mad.lo.u32 to, kind, {width * 4}, to;")
        lines.append("mad.lo.u32 to, slot, 4, to;")
        send([f"z0_{i}" for i in range(OWNED)], "program")
    lines += [f"mov.b32 ${r}, 0;" for r in range(slots)]
    names += [f"{x}{w}_{i}" for x in "xz" for w in range(warps) for i in range(max(SUMS, OWNED))]
    return scope(names, lines)


@gluon.constexpr_function
def receive_code(K, PARTS, SUMS, OWNED, MBARRIER):
    """The second half of an exchange. Outputs, K / 32 per thread: sums, |h|^2 and, where there are owned sums, the thread's own.
    Inputs: numbers of the outputs' shape that are not read, the address of the memory, and the number of the exchange."""
    slots, width = K // 32, K // PARTS
    _, arriving, squares, owned, barriers, _ = exchange_places(K, PARTS, SUMS, OWNED)
    area = (SUMS + 1 + (OWNED > 0)) * slots + slots
    lines = exchange_head(area, area + slots, barriers)
    if MBARRIER:
        lines.append(f"shr.u32 phase, ${area + slots}, 1; and.b32 phase, phase, 1;")
        lines.append("WAIT: mbarrier.try_wait.parity.shared::cta.b64 chosen, [barrier], phase;")
        lines.append("@!chosen bra WAIT;")
    else:
        lines.append("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    lines.append(f"mad.lo.u32 at, buffer, {PARTS * SUMS * K * 4}, area; mad.lo.u32 at, lane, {4 * slots}, at;")
    for i in range(SUMS):
        for program in range(PARTS):
            names = [f"x{program}_{r}" for r in range(slots)]
            lines.append(load_code(names, f"at + {arriving + (program * SUMS + i) * K * 4}"))
        for r in range(slots):
            lines += [sum_code([f"x{program}_{r}" for program in range(PARTS)]), f"mov.f32 ${i * slots + r}, x0_{r};"]
    each = [f"y{program}" for program in range(PARTS)]
    lines += [f"mad.lo.u32 at, buffer, {PARTS * 4}, area;", load_code(each, f"at + {squares}"), sum_code(each)]
    lines += [f"mov.f32 ${SUMS * slots + r}, y0;" for r in range(slots)]
    if OWNED:
        lines.append(f"and.b32 at, thread, {OWNED * width - 1}; mad.lo.u32 at, at, 4, area;")
        lines.append(f"mad.lo.u32 at, buffer, {PARTS * OWNED * width * 4}, at;")
        for program in range(PARTS):
            lines.append(load_code([each[program]], f"at + {owned + program * OWNED * width * 4}"))
        lines.append(sum_code(each))
        lines += [f"mov.f32 ${(SUMS + 1) * slots + r}, y0;" for r in range(slots)]
    return scope([*each, *(f"x{program}_{r}" for program in range(PARTS) for r in range(slots))], lines)


@gluon.constexpr_function
def lane_sums_code(COUNT):
    """The sums of COUNT numbers per lane over the lanes, in all lanes. Lanes share the work: with every shuffle a lane hands over
    half of its numbers."""
    lines = ["mov.u32 lane, %laneid;"]
    names = [f"${COUNT + i}" for i in range(COUNT)]
    for step in (16, 8, 4, 2, 1):
        half = len(names) // 2
        if half:
            lines.append(f"and.b32 bit, lane, {step}; setp.ne.u32 upper, bit, 0;")
            for i in range(half):
                lines.append(f"selp.f32 sent, {names[i]}, {names[i + half]}, upper;")
                lines.append(f"selp.f32 a{i}, {names[i + half]}, {names[i]}, upper;")
                lines.append(f"shfl.sync.bfly.b32 sent, sent, {step}, 0x1f, 0xffffffff;")
                lines.append(f"add.f32 a{i}, a{i}, sent;")
            names = [f"a{i}" for i in range(half)]
        else:
            lines.append(f"shfl.sync.bfly.b32 sent, {names[0]}, {step}, 0x1f, 0xffffffff;")
            lines.append(f"add.f32 a0, {names[0]}, sent;")
            names = ["a0"]
    for i in range(COUNT):
        lane = i * (32 // COUNT)  # its highest bits are those of the number
        lines.append(f"shfl.sync.idx.b32 ${i}, a0, {lane}, 0x1f, 0xffffffff;")
    numbers = ", ".join(f"a{i}" for i in range(max(COUNT // 2, 1)))
    head = f".reg .pred upper; .reg .b32 lane, bit; .reg .f32 sent, {numbers};"
    return "{\n" + "\n".join([head, *lines]) + "\n}"
