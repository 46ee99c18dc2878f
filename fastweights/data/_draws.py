"""Random draws that are the same on every machine: integer and basic floating-point operations on Philox words.

NumPy keeps the words of a bit generator fixed across versions, but neither the algorithms of `Generator.choice` and
its like nor the last bit of `np.log`. Everything here is therefore made from the words with operations that IEEE 754
rounds in one way only. All integers are int64.
"""

import math

import numpy as np

__all__ = ["Draws", "natural_log"]

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH_TERMS = 10  # the first term left out is below 1e-16 for every mantissa


class Draws:
    """The stream of random words of (seed, stream, index), and draws from it.

    Philox is a counter-based generator: the seed is its key; stream and index are the upper words of its counter, so
    that no two streams ever overlap.
    """

    def __init__(self, seed: int, stream: int, index: int):
        self._philox = np.random.Philox(key=int(seed), counter=(stream << 192) | (int(index) << 128))

    def below(self, limit: int, shape: int | tuple[int, ...]) -> np.ndarray:
        """Independent uniform integers in [0, limit), int64. The bias of the remainder is limit / 2^64."""
        return (self._philox.random_raw(shape) % np.uint64(limit)).astype(np.int64)

    def distinct(self, limit: int, rows: int, count: int) -> np.ndarray:
        """In each row `count` different integers of [0, limit), all ordered choices equally likely; [rows, count].

        The sparse case redraws what repeats an earlier entry of its row. It treats all integers alike, and any choice
        can be carried into any other by renaming the integers; so all choices have the same probability.
        """
        if 2 * count > limit:
            return self._permutations(limit, rows)[:, :count]
        chosen = self.below(limit, (rows, count))
        while (again := _repeats(chosen)).any():
            chosen[again] = self.below(limit, int(again.sum()))
        return chosen

    def successive(self, log_weights: np.ndarray, rows: int, count: int) -> np.ndarray:
        """In each row `count` different indices, drawn one after another with probability proportional to the weights
        of those that are left, in the order drawn; [rows, count].

        Exponential race: index i finishes at time E_i / w_i, E_i standard exponential, and the first `count` to
        finish are the draw. The times are compared as logarithms: no weight overflows.
        """
        words = self._philox.random_raw((rows, len(log_weights)))
        uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, and never 0 or 1
        log_times = natural_log(-natural_log(uniform)) - log_weights
        return np.argsort(log_times, axis=1, kind="stable")[:, :count]

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Independent standard normal numbers, float64, by Marsaglia's polar method: of a uniform point (u, v) of the unit
        disc with s = u^2 + v^2, both u and v times sqrt(-2 ln(s) / s) are normal."""
        count = math.prod(shape)
        found, missing = [], count
        while missing > 0:
            points = self._philox.random_raw((2, missing // 2 + missing // 4 + 4))  # a disc fills 0.785 of its square
            u, v = ((points >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-51 - 1  # exact, in (-1, 1), never 0
            s = u * u + v * v
            inside = s < 1
            factor = np.sqrt(-2 * natural_log(s[inside]) / s[inside])
            found.append(np.stack([u[inside] * factor, v[inside] * factor], axis=1).ravel()[:missing])
            missing -= len(found[-1])
        return np.concatenate(found).reshape(shape) if found else np.zeros(shape)

    def _permutations(self, limit: int, rows: int) -> np.ndarray:
        """A random order of [0, limit) in each row: random words, sorted, that carry their index in the lowest bits."""
        bits = (limit - 1).bit_length()
        index_mask = np.uint64((1 << bits) - 1)
        words = self._philox.random_raw((rows, limit))
        tagged = (words & ~index_mask) | np.arange(limit, dtype=np.uint64)
        return (np.sort(tagged, axis=1) & index_mask).astype(np.int64)


def natural_log(x: np.ndarray) -> np.ndarray:
    """ln x for x > 0 to about 1e-15, bit for bit the same everywhere: x = m 2^e, ln m = 2 atanh((m - 1) / (m + 1))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF  # m into [sqrt(1/2), sqrt(2)): nothing cancels near x = 1
    mantissa = np.where(small, 2 * mantissa, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for term in reversed(range(_ATANH_TERMS)):
        series = series * square + 1 / (2 * term + 1)
    return (exponent - small) * _LN2 + 2 * ratio * series


def _repeats(chosen: np.ndarray) -> np.ndarray:
    """True where an entry of [rows, count] equals an earlier one of its row."""
    count = chosen.shape[1]
    ordered = np.sort(chosen * count + np.arange(count), axis=1)
    value, position = np.divmod(ordered, count)
    repeats = np.zeros(chosen.shape, dtype=bool)
    np.put_along_axis(repeats, position[:, 1:], value[:, 1:] == value[:, :-1], axis=1)
    return repeats
