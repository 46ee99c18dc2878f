"""The parts of the leaderboard by name: what each measures, in which direction it is better, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastweights.checks import check_choice
from fastweights.kinds import checked

__all__ = ["PARTS", "Part", "find_part"]


@checked
@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        says: what is measured, in a line.
        measure: the number. better: "higher" or "lower".
        kind: "task" (trained on generated tasks), "language" (language models), "needle" (asks those), "rules" (without training)
            or "read" (from result files of benchmarks/).
    """

    name: str
    says: str
    measure: str
    better: Literal["higher", "lower"]
    kind: Literal["task", "language", "needle", "rules", "read"]

    @property
    def marks_learning(self) -> bool:
        """Whether tables mark what was still learning. Not those of language models: in their short trainings the losses of
        batches differ by more than the loss falls at the end, so that the order of the text would decide."""
        return self.kind == "task"


PARTS = {
    part.name: part
    for part in (
        Part(
            name="mqar", says="associative recall, queries shuffled and in order, by pairs and size of state",
            measure="accuracy", better="higher", kind="task",
        ),
        Part(
            name="regression", says="in-context linear regression beside exact ridge regression", measure="squared error",
            better="lower", kind="task",
        ),
        Part(
            name="tracking", says="state tracking: permutations composed", measure="accuracy", better="higher", kind="task"
        ),
        Part(
            name="language", says="perplexity by context length of one language model", measure="perplexity", better="lower",
            kind="language",
        ),
        Part(
            name="needle", says="loss of a number hidden in text, at the trained length and beyond",
            measure="nats per token of the answer", better="lower", kind="needle",
        ),
        Part(
            name="training-speed", says="tokens per second of a training step of 24 layers", measure="tokens per second",
            better="higher", kind="read",
        ),
        Part(
            name="decoding-speed", says="tokens per second of decoding with 24 layers", measure="tokens per second",
            better="higher", kind="read",
        ),
        Part(
            name="memory", says="state of a sequence and activations of a training step", measure="bytes", better="lower",
            kind="read",
        ),
        Part(
            name="rules", says="memory rules without training: distance from exact least squares on random streams",
            measure="distance", better="lower", kind="rules",
        ),
    )
}  # fmt: skip


@checked
def find_part(name: str) -> Part:
    """The part of a name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    check_choice("part", name, PARTS)
    return PARTS[name]
