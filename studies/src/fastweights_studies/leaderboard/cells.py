"""What stands in the cells of the leaderboard's tables: numbers, marks, and the sentences that explain them."""

from __future__ import annotations

__all__ = ["LEARNING", "MARKS", "READ", "TIES", "UNMARKED", "format_number"]

TIES = (
    "The place in parentheses is 1 and the number of mixers that are better and not tied. = marks a tie: the 95% interval of the "
    "differences seed by seed holds zero, by Student's t with Holm's correction over all comparisons of the column with the "
    "same number of shared seeds. A mixer with one seed has no place, nor has one that shares two seeds with fewer than half of "
    "the others: there is no ranking of these."
)
LEARNING = "* marks a run whose loss was still falling at the end, or that is too short to tell."
UNMARKED = (
    "Whether a language model was still learning is not marked: in the last fifth of so short a training the loss varies between "
    "batches by more than it falls. All of them count as still learning."
)
MARKS = (
    "Numbers are means over seeds, with half the spread after ±; those without ± are of one seed.",
    TIES,
    LEARNING,
    "! marks a mixer of which some runs diverged.",
    "° marks a mixer that is no better than guessing, or finds no needle: it has not begun to learn the task, and nothing "
    "follows about its memory.",
)
READ = (
    "Medians over repeated steps, of one run on one machine, with 8 heads of 128 for every mixer: states are not equal."
)


def format_number(x: float, like: float | None = None) -> str:
    """Three digits, or as many decimals as `like` has."""
    size = abs(x if like is None else like)
    decimals = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{x:,.{decimals}f}"
