"""What a kernel does whose launch overlaps the kernel before it; see runtime/overlap.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Programs of a launch up to which each fetches what it updates before the wait. Those of more would displace each other's lines.
FETCHED = tl.constexpr(512)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """A kernel calls this before it reads what another one may have written, and before it writes. The next kernel may come onto
    the GPU from then on. As every kernel calls it, only the one before may still run: what was written earlier, such as the state
    of a step ago, may be read before."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_matrix(w, row, width, D, LINES: tl.constexpr):
    """Begin to bring rows of a matrix [width, D] into the GPU's cache. LINES: a power of two, at least the 128 bytes of a row."""
    STEP: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    column = tl.minimum(tl.arange(0, LINES) * STEP, D - 1)
    prefetch_lines(w + tl.minimum(row, width - 1).to(tl.int64)[:, None] * D + column[None, :])


@triton.jit
def prefetch_lines(at):
    """Begin to bring the lines at these addresses into the GPU's cache, which all kernels share: what they hold may change."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
