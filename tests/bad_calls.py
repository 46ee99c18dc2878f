"""What every call with a bad argument must do: refuse it at once, say which argument and what it must be, change nothing."""

from __future__ import annotations

import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fastweights.files import WriteError

SECONDS = 10
LONGEST = 2000  # characters of a message, a screen
EXTRA_MEMORY = 2**30  # bytes of address space that a refusal may take
# How torch, NumPy and Python's own operations word their errors: such a message does not speak of the argument.
INTERNAL = (
    r"mat1|mat2|size mismatch|Expected |expected (?:scalar|m1|all tensors)|index out of range|aten|c10|DefaultCPUAllocator|"
    r"object has no attribute|unsupported operand|not subscriptable|not iterable|not callable|unhashable|not supported between|"
    r"unexpected keyword|positional argument|invalid literal|must be str, not|can't be converted|cannot be converted|"
    r"cannot be interpreted|NoneType|has no len|ufunc|broadcast|surrogates not allowed|got an unexpected"
)

REMEDY = (
    r"\bmust\b|\bunknown\b|\bhas no\b|\bholds? no\b|\bneeds?\b|\bdoes not exist\b|\bno layer\b|\bpass (?:either|one)\b|"
    r"\bis taken\b"
)


def check_refused(argument: str, call: Callable[[], object], folder: Path) -> None:
    """`call` must raise ValueError or TypeError that names `argument`, in time, without much memory, without running a layer
    and without changing `folder`, the working directory."""
    before, threads = _content(folder), threading.active_count()
    ran: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: ran.append(module))
    try:
        with _limits():
            began = time.perf_counter()
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            seconds = time.perf_counter() - began
    finally:
        hook.remove()
    assert raised.type in (ValueError, TypeError), f"{raised.type.__name__}: {raised.value}"
    check_words(argument, raised.value)
    assert seconds < SECONDS, f"took {seconds:.0f} s"
    assert not [module for module in ran if any(True for _ in module.parameters())], f"ran {type(ran[0]).__name__}"
    assert _content(folder) == before, "files were written"
    assert threading.active_count() <= threads, "a thread was started"


def check_taken_or_refused(argument: str, call: Callable[[], object], folder: Path) -> None:
    """`call` must end in time and without much memory. Where it raises, then as `check_refused` wants it, or because a place
    cannot be written to."""
    try:
        with _limits():
            call()
    except WriteError as error:
        assert len(str(error)) < LONGEST
    except (ValueError, TypeError) as error:
        check_words(argument, error)


def check_words(argument: str, error: Exception) -> None:
    """The error of a refusal names the argument, in words of the argument, and what to do, in a few lines."""
    message, names = str(error), "|".join(map(re.escape, argument.split("|")))
    assert len(message) < LONGEST, f"a message of {len(message)} characters"
    assert re.search(rf"(?<![\w.])(?:{names})\b", message), f"{argument} is not named: {message}"
    assert not re.search(INTERNAL, message), f"not in words of the argument: {message}"
    assert re.search(REMEDY, message), f"it does not say what to do: {message}"


@contextmanager
def _limits() -> Iterator[None]:
    """Less than a gigabyte more of memory, and an end to a call that does not end by itself."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not refused within {2 * SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc").exists() else 0
    )
    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(2 * SECONDS)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def _content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
