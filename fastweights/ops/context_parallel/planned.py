"""What a model that is divided over processes would send, before there are any."""

from __future__ import annotations

from collections import Counter

__all__ = ["PlannedGroup"]


class PlannedGroup:
    """Stands for a process group that is not there, as its first process. A model on the device "meta" that is divided over it
    notes what one process sends.

    Attributes:
        sent: bytes, by the way of an op, or by the collective where no op exchanges them.
        held: bytes that the process holds during the backward of one call for it, the most of all calls.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.group_name = f"planned {size}"
        self.sent: Counter[str] = Counter()
        self.held = 0.0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def note(self, what: str, sent: float) -> None:
        self.sent[what] += round(sent)

    def note_held(self, held: float) -> None:
        self.held = max(self.held, held)
