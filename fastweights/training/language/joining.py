"""Processes join at the start of a training and leave together: they are compared, and watch each other in between."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from .agreement import check_same_code
from .heartbeat import Heartbeat
from .processes import (
    JOIN_SECONDS,
    check_launch,
    from_main_process,
    gather_to_main,
    name_ranks,
    node,
    note_hosts,
    process_index,
    world_size,
)

__all__ = ["joined", "voice"]

_watch: Heartbeat | None = None
_voice: str | None = ""


@contextmanager
def joined() -> Iterator[None]:
    """Every process of a training enters, and none leaves before the main process has. Where one fails, dies or stands still in
    the block, all of them end, with a message that names it. Inside another such block nothing is done; nor in a single process.

    Raises:
        ValueError: the processes do not find each other, or are not of the same code on the same kind of GPU.
    """
    global _watch, _voice
    check_launch()
    if world_size() == 1 or _watch is not None:
        yield
        return
    rank = process_index()
    _voice = f"{name_ranks(rank)}: " if rank else ""
    places = from_main_process(gather_to_main((socket.gethostname(), node()), JOIN_SECONDS))
    note_hosts([host for host, _ in places])
    _watch = Heartbeat(rank, [launcher for _, launcher in places])
    try:
        check_same_code()
        yield
        from_main_process(None)
        _watch.leave()
    except BaseException as error:
        _voice = _watch.fail(error)
        raise
    finally:
        _watch = None


def voice() -> str | None:
    """What to write before the message of an error that `joined` has let through: the name of this rank where others do not have
    the error, or "". None where the message must not be written, as another process writes it."""
    return _voice if world_size() > 1 else ""
