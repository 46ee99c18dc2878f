"""The order of the steps of a Chebyshev iteration that keeps one iterate.

x <- x - (A x - b) / root, over the roots of a Chebyshev polynomial, ends where the recursion over three iterates does. But in an
order that leaves a part of the range out for long, x or its rounding grows beyond all bounds. Roots a stride apart, as multiples
of it modulo their number, cover the range evenly.
"""

from __future__ import annotations

import math
from functools import lru_cache

CANDIDATES = 24
LARGEST = 64.0  # of an iterate, in lengths of the solution: a float16 operand holds its products with keys


@lru_cache
def stride_between_roots(count: int, low: float) -> int:
    """For eigenvalues in [low, 1 + low] the stride, without a common divisor with the count, that amplifies rounding least."""
    strides = sorted((n for n in range(1, count) if math.gcd(n, count) == 1), key=lambda n: abs(n - 0.6 * count))
    found = {n: amplification(n, count, low) for n in strides[:CANDIDATES]}
    return min(found, key=lambda n: (max(found[n][1], LARGEST), found[n][0]), default=0)


def amplification(stride: int, count: int, low: float) -> tuple[float, float]:
    """What the rounding of all steps comes to in the solution, where it is largest in proportion to it, and the largest iterate,
    in lengths of the solution. The solution is the longer the smaller the eigenvalue: rounding is in proportion to its length,
    but counts beside its part along large eigenvalues, where the keys are."""
    roots = [low + math.sin((2 * j + 1) * math.pi / (4 * count)) ** 2 for j in range(count)]
    order = [roots[stride * i % count] for i in range(count)]
    eigenvalues = [low + 2.0 ** (-i / 4) for i in range(40)] + [low + i / 24 for i in range(24)]
    left, lengths = [1.0] * len(eigenvalues), []
    for root in order:
        lengths.append(max(1.0, *(abs(x) * low / at for x, at in zip(left, eigenvalues))))
        left = [x * (1 - at / root) for x, at in zip(left, eigenvalues)]
    largest = 0.0
    for at in eigenvalues:
        kept, total = 1.0, 0.0
        for root, length in zip(reversed(order), reversed(lengths)):
            total += (at / root * kept * length) ** 2
            kept *= 1 - at / root
        largest = max(largest, math.sqrt(total) * at / low)
    return largest, max(lengths)
