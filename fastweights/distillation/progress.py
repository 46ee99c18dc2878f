"""The progress of measurements that take about as long as each other: a bar on a terminal, a line per measurement elsewhere."""

from __future__ import annotations

from rich.console import Console

from ..training.progress import Display, TimeLeft

__all__ = ["MeasuringProgress"]


class MeasuringProgress:
    """Shows how many of `total` measurements are done, on `console` (None for nowhere). A context manager."""

    def __init__(self, console: Console | None, title: str, *, done: int = 0, total: int) -> None:
        self._display, self._title = Display(console or Console(quiet=True)), title
        self._done, self._total, self._left = done, total, TimeLeft(done, total)

    def __enter__(self) -> MeasuringProgress:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.__exit__()

    def end(self, note: str) -> None:
        """One more is done."""
        self._done += 1
        self._display.show_bar("all", self, title=self._title, total=self._total, done=self._done, note=note)
        if not self._display.is_terminal:
            left = self._left.after(self._done)
            self._display.print_line(f"{self._title}: {note}, {self._done} of {self._total}, {left} left")
