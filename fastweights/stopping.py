"""Signals that ask a process to stop, as clusters send them before they take a machine back; and the end of processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SIGNALS", "StopSignals", "Stopped", "join_or_kill"]

# Windows has only the first.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))

# One request to stop may arrive twice: `timeout` signals its command and then the group of processes that it is in, and
# torchrun passes on a signal that the cluster may have sent to its processes as well.
REPEATED_SECONDS = 0.2
REPEATED_BY_LAUNCHER_SECONDS = 2.0
KILLED_SECONDS = 10.0  # until a killed process is gone


class Stopped(KeyboardInterrupt):
    """A signal asked this process to stop. Like Ctrl-C, it is no error that ordinary code may handle."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopSignals:
    """While entered, SIGTERM, SIGHUP and SIGUSR1 raise `Stopped`, or are only noted while the body holds them.

    A second signal ends the process at once. Leaving restores the handlers of before. Python allows handlers in the main
    thread only; in another thread entering does nothing. A signal that the process ignores (nohup) stays ignored.

    Attributes:
        received: number of the signal that arrived; None before.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._holding = False
        self._time = 0.0
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: of another language, which Python could not restore
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """The body looks at `received` itself and ends soon after it is set. `Stopped` is raised behind the body."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self.received is not None:
            raise Stopped(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = number, now
            self._leave_lost_terminals()
            if not self._holding:
                raise Stopped(number)
        elif now - self._time > _repeated_seconds():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave_lost_terminals(self) -> None:
        """After the hang-up of a terminal every write to it fails, which must not cost the checkpoint."""
        for terminal in self._terminals:
            if not os.isatty(terminal):
                with suppress(OSError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), terminal)


def _repeated_seconds() -> float:
    return REPEATED_BY_LAUNCHER_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else REPEATED_SECONDS


def join_or_kill(processes: Iterable[Any], seconds: float) -> None:
    """Wait until processes have ended, `seconds` for all together; kill those that have not."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(until - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join(KILLED_SECONDS)
