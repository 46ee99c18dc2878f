"""Marks that say what a test needs: where it is missing, the test is skipped."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED

# How long hypothesis takes for an example says something about the machine alone.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Thousands of tests, all of which would be skipped.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
NEEDS = {
    "kernels": (
        HAS_TRITON and (INTERPRETED or torch.cuda.is_available()),
        "needs triton and a GPU or TRITON_INTERPRET=1",
    ),
    "compiler": (HAS_TRITON and not INTERPRETED, "needs triton's compiler"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-form", action="store_true", help="compile every form of the kernels, not a selection")


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        choice = item.get_closest_marker("fast_where")
        if choice and not choice.args[0](item.callspec.params):
            item.add_marker(pytest.mark.slow)
        for name, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end. Frozen, they are not walked again by every full garbage collection, of which
    transformers' Trainer alone starts one per training."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as in the workers: the numbers of a run are those of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What Python does by default with the signals that ask a process to stop.
DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL),
}


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """Signals that the tests' own parent ignores (nohup: SIGHUP; a shell's background job: SIGINT) arrive at the test and at the
    processes that it starts."""
    ignored = [number for number in DEFAULTS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, DEFAULTS[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
