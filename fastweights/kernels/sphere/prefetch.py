"""What a block of tokens will read, on its way into the L1 cache while the block before is computed."""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes


@triton.jit
def prefetch_rows(x, row, count, apart, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows `row`, `row + apart`, .. of WIDTH numbers, `count` of them, at most ROWS; one cache line per thread."""
    BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH * BYTES + LINE - 1) // LINE)
    i = tl.arange(0, ROWS * LINES)
    at = (row + tl.minimum(i // LINES, count - 1) * apart) * WIDTH + tl.minimum(i % LINES * (LINE // BYTES), WIDTH - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [(x + at).to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
