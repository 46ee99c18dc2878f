"""Checks of arguments that the recall tasks share."""

import difflib
from collections.abc import Iterable
from numbers import Integral, Real

from ._splits import SPLITS

__all__ = ["batch_arguments", "integer", "one_of", "real"]

LARGEST_COUNTER = 2**63 - 1  # a seed or an index is one 64-bit word of the random generator's key


def integer(name: str, value: object, at_least: int, at_most: int = LARGEST_COUNTER) -> int:
    """`value` as an int when it is an integer (no bool, no float) in [at_least, at_most]; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}; pass an int of at least {at_least}")
    if not at_least <= int(value) <= at_most:
        raise ValueError(f"{name} must be from {at_least} to {at_most}, got {value}; pass a number in that range")
    return int(value)


def real(name: str, value: object, above: float, below: float) -> float:
    """`value` as a float when it is a number (no bool) strictly between the bounds; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) < below:
        raise ValueError(
            f"{name} must be a number above {above:g} and below {below:g}, got {value!r}; pass one in between"
        )
    return float(value)


def batch_arguments(split: object, seed: object, index: object, batch_size: object) -> None:
    """ValueError unless the arguments name a batch of a task."""
    one_of("split", split, SPLITS)
    integer("seed", seed, 0)
    integer("index", index, 0)
    integer("batch_size", batch_size, 1)


def one_of(what: str, value: object, valid: Iterable[str]) -> None:
    """ValueError, with the nearest valid names, unless `value` is among `valid`."""
    names = list(valid)
    if value not in names:
        close = difflib.get_close_matches(str(value), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{what} must be one of {', '.join(names)}, got {value!r}; {hint}choose one of them")
