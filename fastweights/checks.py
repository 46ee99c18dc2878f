"""Argument checks for the whole library: TypeError for a wrong kind of argument, ValueError for a wrong value.

Every message names the argument, what it must be and what it was.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fractions import Fraction
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "LARGEST_COUNT",
    "LARGEST_COUNTER",
    "LARGEST_DEPTH",
    "LARGEST_HEAD",
    "LARGEST_HEADS",
    "LARGEST_WIDTH",
    "check_choice",
    "check_dense",
    "check_device",
    "check_dtype",
    "check_flag",
    "check_list",
    "check_number",
    "check_path",
    "check_positive",
    "check_real",
    "check_size",
    "check_some",
    "check_tensor",
    "check_text",
    "check_texts",
    "check_tokens",
    "check_unicode",
    "check_whole_number",
    "closest",
    "constant",
    "error_prefix",
    "shape_of",
    "describe_value",
    "values_are_checked",
    "values_can_be_read",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_HEAD = 256  # channels per head
LARGEST_WIDTH = 2**20  # channels of a layer's input; like the next two far above every model there is
LARGEST_HEADS = 2**16
LARGEST_DEPTH = 10_000  # layers of a model; the deepest that have been trained have about a thousand
LARGEST_COUNT = 10**9  # steps, rows or examples of one command: more would not end
LONGEST_VALUE = 200  # characters of a value in a message
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes of a file's name and of a path that Linux takes; others take no more
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # of numbers of tokens
NUMBER = r"[0-9]{1,30}(\.[0-9]{1,30})?"
MOST_TOKENS = 10**16
LARGEST_COUNTER = 2**63 - 1  # a seed or an index is one 64-bit word of the random generator's key


def closest(name: object, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for a misspelt name, or nothing when no known name is near."""
    matches = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def describe_value(x: object) -> str:
    """How a message shows an argument: numbers and text as they are written, other objects by their type."""
    if isinstance(x, Tensor):
        return "a nested tensor" if x.is_nested else f"a tensor of shape {shape_of(x)}"
    if isinstance(x, int) and not isinstance(x, bool):
        return _write_number(x)
    if x is None or isinstance(x, (bool, float, str)):
        return _shorten(repr(x))
    if isinstance(x, (list, tuple, dict, set)):
        return _SHORT.repr(x)
    return f"{type(x).__name__} {_SHORT.repr(x)}"


class _Short(reprlib.Repr):
    """Objects without their addresses, which tell nobody anything."""

    def repr_instance(self, x: object, level: int) -> str:
        return f"<{type(x).__name__}>" if " at 0x" in repr(x) else super().repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        return _write_number(x)


_SHORT = _Short()


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 50]}...{text[-40:]}"


def _write_number(x: int, form: str = "") -> str:
    """A whole number. Python itself refuses to write one of more than 4,300 digits."""
    return format(x, form) if x.bit_length() < 10 * LONGEST_VALUE else f"a number of {x.bit_length():,} bits"


def check_whole_number(name: str, x: object, *, low: int = 0, high: int = LARGEST_COUNTER) -> int:
    """A whole number from `low` to `high`. NumPy's integers count, floats and bools do not."""
    bounds = f"of at least {low}" if high == LARGEST_COUNTER else f"from {low} to {high}"
    number = _check_whole(name, x, f"a whole number {bounds}")
    if not low <= number <= high:
        if number > high == LARGEST_COUNTER:
            bounds = f"from {low} to 2^63 - 1"  # the largest that a random generator takes
        raise ValueError(f"{name} must be a whole number {bounds}, got {_write_number(number)}")
    return number


def check_size(name: str, x: object, *, high: int = LARGEST_COUNTER) -> int:
    """A positive whole number up to `high`."""
    number = _check_whole(name, x, "a positive whole number")
    if number < 1:
        raise ValueError(f"{name} must be a positive whole number, got {_write_number(number)}")
    if number > high:
        raise ValueError(
            f"{name} must be a positive whole number of at most {high:,}, got {_write_number(number, ',')}; pass a smaller one"
        )
    return number


def check_tokens(name: str, value: object, *, low: int = 1) -> int:
    """A number of tokens: a whole number, or a text with a suffix such as "15B" (K, M, B, T: 10^3, 10^6, 10^9, 10^12).

    Raises:
        ValueError: another text, or a number that is not whole, or less than `low`.
        TypeError: a value of another kind.
    """
    if not isinstance(value, str):
        return check_whole_number(name, value, low=low, high=MOST_TOKENS)
    text = value.strip().replace("_", "").replace(",", "")
    size = SUFFIXES.get(text[-1:].upper(), 1)
    written = text[:-1] if size > 1 else text
    number = Fraction(written) * size if re.fullmatch(NUMBER, written) else None
    if number is None or number.denominator != 1:
        raise ValueError(
            f'{name} must be a whole number of tokens such as 15000000 or "15B" (suffixes {", ".join(SUFFIXES)}), got '
            f"{describe_value(value)}"
        )
    return check_whole_number(name, int(number), low=low, high=MOST_TOKENS)


def _check_whole(name: str, x: object, wanted: str) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, Integral)):
        raise TypeError(f"{name} must be {wanted}, got {describe_value(x)}; pass an int")
    return int(x)


def constant(x: Any) -> Any:
    """x as a constant of the graph. torch.compile would otherwise make a symbol of a number that differs from call to
    call; the elements of a set stay constants."""
    return list({x})[0] if isinstance(x, (int, float)) else x


def check_number(
    name: str,
    x: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number with low <= x <= high and above < x < below, as far as these bounds are given."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe_value(x)}; pass an int or float")
    number = constant(x)
    beyond = isinstance(number, int) and number.bit_length() > 1023  # no float can be compared with it
    fits = (
        not beyond
        and math.isfinite(number)
        and (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not fits:
        bounds = {"more than": above, "at least": low, "less than": below, "at most": high}
        given = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
        raise ValueError(f"{name} must be a finite number{f', {given}' * bool(given)}, got {describe_value(number)}")
    return float(number)


def check_positive(name: str, x: object) -> float:
    """A positive finite number."""
    number = check_number(name, x)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {x}")
    return number


def check_flag(name: str, x: object) -> bool:
    """True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {describe_value(x)}")
    return x


def check_choice(name: str, x: object, choices: Iterable[object]) -> Any:
    """One of `choices`. TypeError where none of them is of the kind of x."""
    known = list(choices)
    if not isinstance(x, tuple({type(choice) for choice in known})):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, known))}, got {describe_value(x)}")
    if x not in known:
        near = closest(x, [choice for choice in known if isinstance(choice, str)]) if isinstance(x, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {describe_value(x)}{near}")
    return x


def check_text(name: str, x: object, *, what: str = "a string", empty: bool = True) -> str:
    """A string; `what` describes it in the message; `empty` says whether it may be ''."""
    if not isinstance(x, str):
        raise TypeError(f"{name} must be {what}, got {describe_value(x)}; pass a string")
    if not empty and not x:
        raise ValueError(f"{name} must be {what}, got ''")
    return x


def check_unicode(name: str, x: object) -> str:
    """A string that UTF-8 can write. Bytes that are not UTF-8 become lone surrogates in a command's arguments, which no
    tokenizer takes."""
    text = check_text(name, x, what="text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text that UTF-8 can write, got {text[error.start : error.start + 1]!a} at character {error.start}; "
            "pass text in UTF-8"
        ) from None
    return text


def check_path(name: str, x: object, what: str = "a path") -> Path:
    """A string or path, as a path."""
    if not isinstance(x, (str, PathLike)) or isinstance(x, bytes):
        raise TypeError(f"{name} must be {what}, got {describe_value(x)}; pass a string or pathlib.Path")
    if not str(x):
        raise ValueError(f"{name} must be {what}, got ''")
    if "\0" in str(x):
        raise ValueError(f"{name} must be {what}, got {str(x)!r}; leave out the character 0")
    path = Path(x)
    if _count_bytes(str(path)) > LONGEST_PATH or any(_count_bytes(part) > LONGEST_NAME for part in path.parts):
        raise ValueError(
            f"{name} must be {what} of at most {LONGEST_PATH:,} bytes, and {LONGEST_NAME} between two slashes, got "
            f"'{str(x)[:40]}...'; choose a shorter one"
        )
    return path


def _count_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def check_list(name: str, x: object, what: str, kind: type = object) -> tuple[Any, ...]:
    """A list or tuple of entries of `kind`, as a tuple; `what` describes the entries in the message."""
    if not isinstance(x, (list, tuple)) or not all(isinstance(entry, kind) for entry in x):
        raise TypeError(f"{name} must be a list of {what}, got {describe_value(x)}")
    return tuple(x)


def check_some(name: str, x: Collection[object], what: str) -> None:
    """ValueError where there are no entries; `what` describes one of them."""
    if not len(x):
        raise ValueError(f"{name} must hold at least one {what}, got none")


def check_texts(name: str, x: object, *, what: str = "strings", empty: bool = True) -> tuple[str, ...]:
    """A list or tuple of strings, as a tuple; `empty` says whether one of them may be ''."""
    texts: tuple[str, ...] = check_list(name, x, what, str)
    if not empty and not all(texts):
        raise ValueError(f"{name} must be a list of {what}, none of them empty, got {describe_value(x)}")
    return texts


def values_can_be_read(x: Tensor) -> bool:
    """Whether a check may look at the numbers of x. On a GPU it would wait for the device, and in a traced graph it would
    break the graph, so there the numbers are not checked."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def values_are_checked(x: Tensor) -> bool:
    """`values_can_be_read`; and with FASTWEIGHTS_CHECK_VALUES=1 the numbers on a GPU are waited for."""
    if values_can_be_read(x):
        return True
    asked = os.environ.get("FASTWEIGHTS_CHECK_VALUES") == "1"
    return asked and x.device.type != "meta" and not torch.compiler.is_compiling()


def shape_of(x: Tensor) -> str:
    return str(list(x.shape))


def check_dtype(name: str, x: object) -> torch.dtype:
    """A floating-point dtype that the ops take."""
    wanted = f"{name} must be torch.float16, torch.bfloat16, torch.float32 or torch.float64"
    if not isinstance(x, torch.dtype):
        raise TypeError(f"{wanted}, got {describe_value(x)}; pass a torch.dtype")
    if x not in FLOATS:
        raise ValueError(f"{wanted}, got {x}; pass one of these")
    return x


def check_dense(name: str, x: Tensor) -> Tensor:
    """A tensor with a place in memory for each number: not a sparse, nested or MKL-DNN one."""
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested one" if x.is_nested else str(x.layout)
        remedy = "pad its rows, or pack them into one and pass cu_seqlens" if x.is_nested else f"pass {name}.to_dense()"
        raise ValueError(f"{name} must be a dense tensor, got {kind}; {remedy}")
    return x


def check_tensor(name: str, x: object, like: Tensor | None = None, *, integer: bool = False) -> Tensor:
    """A floating-point tensor (or one of 64-bit integers), on the device of `like`."""
    if not isinstance(x, Tensor):
        got = "None" if x is None else type(x).__name__
        raise TypeError(f"{name} must be a torch.Tensor, got {got}; convert it with torch.as_tensor")
    check_dense(name, x)
    if integer and x.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {x.dtype}; convert it with {name}.long()")
    if not integer and x.dtype not in FLOATS:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; convert it with {name}.float()"
        )
    if like is not None and x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of the other inputs, {like.device}, got {x.device}; move it there"
        )
    return x


def check_real(name: str, x: Tensor) -> Tensor:
    """A tensor of real numbers that are all in memory."""
    check_dense(name, x)
    if x.device.type == "meta":
        raise ValueError(f"{name} must hold numbers, got a tensor on the device 'meta'; load or make them first")
    if x.is_complex():
        raise ValueError(f"{name} must be of real numbers, got {x.dtype}; pass its real part")
    return x


def check_device(device: object) -> None:
    """ValueError unless `device` is one of torch's that this machine has and that computes. A process that only starts others
    leaves the GPU alone: nothing is put there."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a torch device such as 'cpu' or 'cuda', got {describe_value(device)}; pass a string"
        )
    wanted = f"device must be a torch device that this machine has, got {describe_value(str(device))}"
    try:
        known = torch.device(check_unicode("device", str(device)))
    except RuntimeError:
        raise ValueError(f"{wanted}; name one such as 'cpu' or 'cuda'") from None
    if known.type == "cuda":
        count = torch.cuda.device_count()
        if (known.index or 0) >= count:
            raise ValueError(f"{wanted}: torch sees {count} CUDA devices; name one from 0, or 'cpu'")
        return
    try:
        torch.zeros(1, device=known).item()  # the device "meta" keeps no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{wanted}: {_shorten(str(error).partition(chr(10))[0])}") from None


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Puts `prefix` and a colon before the message of a TypeError or ValueError of the body."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{prefix}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from None
