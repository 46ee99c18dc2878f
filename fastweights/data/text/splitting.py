"""Which text is held out: files or rows by a hash of their names, and at least one document on each side."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Document", "Length", "Lengths", "Piece", "cut", "hash_fraction", "split"]

LARGEST = 0.5  # of all text: a file or row with more than that is not held out whole
SMALLEST = 0.5  # of the mean size: a file or row with less than that would be too little to measure on


@dataclass(frozen=True)
class Document:
    """One text, and whether it is kept from training."""

    text: str
    held_out: bool


class Lengths(NamedTuple):
    """The least and the largest number of tokens of a document, without its end of text. most: None for no limit."""

    least: int = 0
    most: int | None = None

    def admits(self, tokens: int) -> bool:
        return self.least <= tokens <= (tokens if self.most is None else self.most)


class Piece(NamedTuple):
    """Text of a file or row. number: position of the file or row. name: the same on every machine."""

    number: int
    name: str
    text: str


class Length(NamedTuple):
    """Characters of a text: all of them, and those up to the last that is no whitespace."""

    whole: int
    written: int

    @staticmethod
    def of(pieces: Iterable[str]) -> Length:
        whole = written = 0
        for piece in pieces:
            if piece.strip():
                written = whole + len(piece.rstrip())
            whole += len(piece)
        return Length(whole, written)


class _Unit(NamedTuple):
    """A file or row. draw: the hash of its name, from 0 to 1."""

    draw: float
    number: int
    length: Length


def split(pieces: Callable[[], Iterable[Piece]], fraction: float) -> Iterator[Document]:
    """The documents of `pieces`, which must return the same pieces at each call. Files and rows whose hash is below `fraction`
    are held out, independently of all others.

    Where one side would stay empty, as with a few files, one file or row changes sides: the one with the lowest hash becomes
    held-out text, or the one with the highest hash becomes train text. One more file then moves no earlier file but this one. A
    file that has most of the text, or is much shorter than the others, does not become held-out text. Where there is no other
    file, the end of the longest one is held out.
    """
    one_sided = _one_sided(pieces(), fraction)
    moved = _moved(one_sided, fraction)
    longest = max(one_sided, key=lambda unit: unit.length.whole, default=None)
    for number, own in itertools.groupby(pieces(), key=lambda piece: piece.number):
        if moved is None and longest is not None and longest.number == number:
            yield from cut((piece.text for piece in own), longest.length, fraction)
        else:
            for piece in own:
                yield Document(piece.text, (hash_fraction(piece.name) < fraction) != (number == moved))


def cut(pieces: Iterable[str], length: Length, fraction: float) -> Iterator[Document]:
    """The text as train text, and its end as held-out text. The cut is at the next end of a line if one is near."""
    train, written = min(round((1 - fraction) * length.whole), length.written - 1), length.written
    for piece in pieces:
        near = min((train + len(piece)) // 2, written - 1)
        place = 0 if train <= 0 else piece.find("\n", train, near) + 1 or train
        yield Document(piece[:place], False)
        yield Document(piece[place:], True)
        train -= len(piece)
        written -= len(piece)


def _one_sided(pieces: Iterable[Piece], fraction: float) -> list[_Unit]:
    """All files and rows where the hash puts all of them on one side; otherwise an empty list. Reading stops at the first file
    or row on the other side."""
    found: list[_Unit] = []
    for number, own in itertools.groupby(pieces, key=lambda piece: piece.number):
        first = next(own)
        draw = hash_fraction(first.name)
        if found and (draw < fraction) != (found[0].draw < fraction):
            return []
        found.append(_Unit(draw, number, Length.of(piece.text for piece in itertools.chain([first], own))))
    return found


def _moved(units: list[_Unit], fraction: float) -> int | None:
    """The number of the file or row that changes sides; None without one."""
    if len(units) < 2:
        return None
    if units[0].draw < fraction:
        return max(units).number
    characters = sum(unit.length.whole for unit in units)
    least, most = SMALLEST * characters / len(units), LARGEST * characters
    usual = [unit for unit in units if least <= unit.length.whole <= most]
    return min(usual).number if usual else None


def hash_fraction(name: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
