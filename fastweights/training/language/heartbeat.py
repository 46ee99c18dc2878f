"""Heartbeats between the processes of a training. Where one dies, stands still or fails, the others end within a minute and say
which it was.

Every process holds a connection to rank 0. A thread at each end sends a byte per second, so that a process that compiles or
tokenizes for an hour is known to be alive. A process that is killed closes its connection; one that is stopped, or whose host is
lost, falls silent. torchrun alone ends the processes of one host only; those of others would wait in a collective.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ...terminal import show
from ...untrusted import one_line
from .processes import from_main_process, name_ranks

__all__ = ["Heartbeat"]

BEAT_SECONDS = 1.0
SILENT_SECONDS = 40.0  # a library that loads or compiles may hold Python's lock, and with it the thread, for seconds
GRACE_SECONDS = 5.0  # for a process to end by itself, as by an error that all of them raise
SAME_SECONDS = 2.0  # in which processes raise the same error
CONNECT_SECONDS = 30.0  # less than SILENT_SECONDS: rank 0 beats once all have connected
CONTINUES = "the same command continues after the last checkpoint"


@dataclass
class _Peer:
    """The other end of a connection. heard: when it last sent anything."""

    rank: int
    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""


class Heartbeat(threading.Thread):
    """Watches the other processes, and is watched by them, until it is left.

    Args:
        rank: of this process.
        nodes: for every rank a name that those of one launcher share. One of them alone reports an end to their common log.

    Raises:
        ValueError: the processes cannot reach each other.
    """

    def __init__(self, rank: int, nodes: Sequence[str]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._rank, self._nodes = rank, nodes
        self._before = [other for other in range(rank) if nodes[other] == nodes[rank]]
        self._failures: dict[int, str] = {}  # by rank: its message; of a rank that was lost what became of it
        self._leaving = False
        self._lost = False  # whether a rank has ended without a message of its own
        self._deadline = float("inf")
        self._changed, self._sending, self._closed = threading.Condition(), threading.Lock(), threading.Event()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        for peer in _accept(len(nodes)) if rank == 0 else [_connect(rank)]:
            peer.connection.setblocking(False)
            self._peers[peer.rank] = peer
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self.start()

    def run(self) -> None:
        sent = before = time.monotonic()
        while not self._closed.is_set():
            for key, _ in self._selector.select(BEAT_SECONDS):
                self._hear(key.data)
            now = time.monotonic()
            if now - before > SILENT_SECONDS / 2:  # this process was stopped, perhaps with the others, as by Ctrl-Z
                for peer in self._peers.values():
                    peer.heard = now
            before = now
            if now - sent >= BEAT_SECONDS:
                self._send(b"\n")
                sent = now
            for peer in list(self._peers.values()):
                if now - peer.heard > SILENT_SECONDS:
                    self._lose(peer, f"has not answered for {SILENT_SECONDS:.0f} seconds: is it or its host stopped?")
            if now > self._deadline:
                self._end()

    def fail(self, error: BaseException) -> str | None:
        """Tell the others of an error that ends this process.

        Returns:
            What to write before its message: the name of this rank, unless rank 0 raises the same error; None where another
            process of the node writes the same, or why this one has failed.
        """
        until = time.monotonic() + (SILENT_SECONDS + 2 * GRACE_SECONDS if _is_about_others(error) else 0)
        while time.monotonic() < until:  # the thread finds out which, reports it, and ends this process
            with suppress(KeyboardInterrupt):  # torchrun asks the others to stop
                time.sleep(BEAT_SECONDS)
        words = one_line(error if isinstance(error, (ValueError, OSError, KeyboardInterrupt)) else repr(error))
        self._tell(self._rank, words)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled(words), SAME_SECONDS)
                if self._lost or self._is_said(words, self._before):
                    return None
                return "" if self._rank == 0 or self._is_said(words, [0]) else f"{name_ranks(self._rank)}: "
        finally:
            self._closed.set()

    def leave(self) -> None:
        """Stop watching, where this process has done its work. Rank 0 waits until the others have said that they leave: they may
        still need its store. It does not say so itself, as they would close the connection, which is how they leave."""
        self._leaving = True
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._peers)
        else:
            self._tell(self._rank, None)
        self._closed.set()
        self.join()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()

    def _is_settled(self, words: str) -> bool:
        """Whether to wait no longer before this process ends. Rank 0 passes on what others tell."""
        return not self._peers if self._rank == 0 else self._is_said(words, self._before or [0])

    def _is_said(self, words: str, ranks: Sequence[int]) -> bool:
        return any(self._failures.get(rank) == words for rank in ranks)

    def _tell(self, rank: int, words: str | None, *, lost: bool = False) -> None:
        """Send what became of a rank; without words it has done its work."""
        self._send(json.dumps({"rank": rank, "words": words, "lost": lost}).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        with self._sending:
            for peer in list(self._peers.values()):
                with suppress(OSError):  # of one that has ended, or is stopped with a full buffer: its silence tells
                    peer.connection.send(data)

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(peer, "has ended without a message: was it killed, as where memory runs out?")
            return
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in filter(None, lines):
            told = json.loads(line)
            if told["words"] is None:
                self._drop(peer)
            else:
                self._note(**told)

    def _lose(self, peer: _Peer, why: str) -> None:
        self._drop(peer)
        if not self._leaving and not self._failures:  # after one has failed, others end for that reason
            self._note(peer.rank, why, lost=True)

    def _drop(self, peer: _Peer) -> None:
        with self._changed:
            if self._peers.pop(peer.rank, None) is not None:
                self._selector.unregister(peer.connection)
                peer.connection.close()
                self._changed.notify_all()

    def _note(self, rank: int, words: str, lost: bool) -> None:
        """Keep what became of a rank, and pass it on. This process ends soon."""
        with self._changed:
            if rank in (self._rank, *self._failures):
                return
            self._failures[rank] = words
            self._lost = self._lost or lost
            self._changed.notify_all()
        if self._rank == 0:
            self._tell(rank, words, lost=lost)
        if lost:
            self._report(f"{name_ranks(rank)} {words} The others end too; {CONTINUES}")
        self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)

    def _report(self, line: str) -> None:
        """Write a line, once for the processes of this node that are left."""
        if all(rank in self._failures for rank in self._before):
            show(f"fastweights: error: {line}", error=True)

    def _end(self) -> None:
        """End this process, whose main thread may be waiting for a process that has ended."""
        rank, words = next(iter(self._failures.items()))
        if not self._lost and self._nodes[rank] != self._nodes[self._rank]:  # there it has written a message itself
            self._report(f"ended, as {name_ranks(rank)} has failed: {words}; {CONTINUES}")
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _is_about_others(error: BaseException) -> bool:
    """Whether an error may come of the end of another process: gloo's have no class of their own."""
    return isinstance(error, torch.distributed.DistError) or bool(re.search("gloo|NCCL", str(error)))


def _accept(processes: int) -> list[_Peer]:
    """In rank 0: the connections of all others. Who does not know the secret is turned away."""
    secret, peers = secrets.token_hex(16), {}
    until = time.monotonic() + CONNECT_SECONDS
    with _listen(processes) as server:
        port, _ = from_main_process((server.getsockname()[1], secret))
        while missing := [rank for rank in range(1, processes) if rank not in peers]:
            server.settimeout(max(until - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise ValueError(
                    f"{name_ranks(*missing)} must connect to rank 0 at port {port} of {_address()}, but "
                    f"did not in {CONNECT_SECONDS:.0f} seconds; let the hosts of a training reach each other at every port"
                ) from None
            peer = _greeted(connection, secret)
            if peer is None:
                connection.close()
            else:
                peers[peer.rank] = peer
    return list(peers.values())


def _listen(processes: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=processes, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=processes)


def _greeted(connection: socket.socket, secret: str) -> _Peer | None:
    """The peer whose first line has the secret and its rank."""
    connection.settimeout(GRACE_SECONDS)
    data = b""
    with suppress(OSError, ValueError):
        while b"\n" not in data and (part := connection.recv(2**10)):
            data += part
        line, unread = data.split(b"\n", 1)
        given, rank = line.decode().split()
        if secrets.compare_digest(given, secret):
            return _Peer(int(rank), connection, unread=unread)
    return None


def _connect(rank: int) -> _Peer:
    """In another rank: the connection to rank 0."""
    port, secret = from_main_process(None)
    try:
        connection = socket.create_connection((_address(), port), timeout=CONNECT_SECONDS)
        connection.sendall(f"{secret} {rank}\n".encode())
    except OSError as error:
        raise ValueError(
            f"{name_ranks(rank)} must reach rank 0 at port {port} of {_address()}, but cannot ({error}); let the hosts of a "
            "training reach each other at every port"
        ) from None
    return _Peer(0, connection)


def _address() -> str:
    return os.environ["MASTER_ADDR"]
