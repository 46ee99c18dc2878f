"""The preconditioner's write keys of a chunk, in Gluon for Hopper GPUs: `precondition` of this family, for `solve_chunks`."""

from __future__ import annotations

from ...common.hopper_tiles import add, product_layout
from ...common.math import LN2, clamp_decay
from ...runtime.gluon import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait

LARGEST = gl.constexpr(1e38)  # for a square


@gluon.jit
def approximate(x, FUNCTION: gl.constexpr):
    """The hardware's own "ex2", "lg2" or "rcp", to about 2^-22."""
    return gl.inline_asm_elementwise(
        FUNCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def widen(x):
    """bfloat16 as float32, by one instruction per number."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def zero_bad(x):
    return gl.where(gl.abs(x) < float("inf"), x, 0.0)


@gluon.jit
def load_gates(precond_g, precond_beta, count, HV: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr):
    """The log decay and the gain of a chunk's tokens. Asked for ahead of the tiles of a chunk, they come before them."""
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    t = gl.arange(0, 64, LINE)
    gain = gl.load(precond_beta + t * (HV // HEADS_PB), t < count, 0.0)
    return gl.load(precond_g + t * (HV // HEADS_PG), t < count, 0.0), gain


@gluon.jit
def keep_gates(lines, decay, gain):
    """The summed log decay (base 2) and the gain of a chunk's tokens into lines [128], as if bad ones were 0. What comes back, by
    token, is NaN where one is bad, else 0."""
    decay, gain = clamp_decay(decay), gain.to(gl.float32)
    lines.slice(0, 64).store(gl.associative_scan(zero_bad(decay), 0, add))
    lines.slice(64, 64).store(zero_bad(gain))
    return 0.0 * (gain + decay)


@gluon.jit
def pair_decays(lines, SQUARE: gl.constexpr):
    """exp(G_i - G_j) of tokens j < i [64, 64], else 0."""
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    earlier = gl.arange(0, 64, ROW)[:, None] > gl.arange(0, 64, COLUMN)[None, :]
    gap = lines.slice(0, 64).load(ROW)[:, None] - lines.slice(0, 64).load(COLUMN)[None, :]
    return approximate(gl.where(earlier, gap, -LARGEST), "ex2")


@gluon.jit
def prepare_energy(lines, decay, gain, TYPE: gl.constexpr):
    """What the energy of a chunk needs beside its keys, which are still being copied: gates into lines, see `keep_gates`, and as
    a left operand exp(G_i - G_j) beta_j of tokens j < i. What comes back beside it, by token, is NaN where a gate is bad, else
    0."""
    SQUARE: gl.constexpr = product_layout(4, 64)
    bad = keep_gates(lines, decay, gain)
    weights = pair_decays(lines, SQUARE) * lines.slice(64, 64).load(gl.SliceLayout(0, SQUARE))[None, :]
    return gl.convert_layout(weights.to(TYPE), gl.DotOperandLayout(0, SQUARE, 2)), bad


@gluon.jit
def precondition_keys(ws, ks, lines, left, gram, begin, middle, power, eps):
    """Write keys from the keys in ks [64, K], into ws, as if bad keys were 0. lines, left: see `prepare_energy`. gram [K]: A at
    the chunk's start, of which begin [64] has been loaded."""
    TYPE: gl.constexpr = ks.dtype
    K: gl.constexpr = ks.shape[1]
    SQUARE: gl.constexpr = product_layout(4, 64)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    since = approximate(lines.slice(0, 64).load(ROW), "ex2")
    own = lines.slice(64, 64).load(ROW)
    energy = gl.allocate_shared_memory(TYPE, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    for part in gl.static_range(K // 64):
        keys = widen(ks.slice(part * 64, 64, dim=1).load(SQUARE))
        square = gl.minimum(keys * keys, LARGEST)  # also of a NaN
        energy.store(square.to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        A = warpgroup_mma(left, energy, zeros, use_acc=False, is_async=True)
        square = own[:, None] * square + (since[:, None] * begin[None, :] + eps)
        if part < K // 64 - 1:
            begin = load_begin(gram, part + 1)
        A, left = warpgroup_mma_wait(0, deps=[A, left])
        r = approximate(square + A, "lg2") * LN2 - middle
        r *= approximate(1.0 + gl.abs(r), "rcp")
        ws.slice(part * 64, 64, dim=1).store((approximate(-power * r, "ex2") * keys).to(TYPE))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def load_begin(gram, part: gl.constexpr):
    """A at the chunk's start, of 64 channels."""
    return gl.load(gram + part * 64 + gl.arange(0, 64, gl.SliceLayout(0, product_layout(4, 64))))
