"""The parts of the leaderboard by name: those of the library, and one for every task that a user has registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights.checks import check_choice
from fastweights.data import TASKS
from fastweights.kinds import checked

from .language import LanguagePart
from .matched_language import MatchedLanguagePart
from .measured import DecodingSpeed, Memory, TrainingSpeed
from .part import Part
from .trainings import RecallPart, TaskPart
from .untrained import RulesPart

__all__ = ["PARTS", "find_part", "known_parts"]

RECALL: dict[str, Any] = {"measure": "accuracy", "better": "higher", "value": "accuracy"}
LOSS: dict[str, Any] = {"measure": "nats per token", "better": "lower", "value": "loss"}
PROXIES = MatchedLanguagePart(
    name="language-proxies",
    says="smaller models of code in one block, which find learning rates: test text, identifiers, long contexts, needles",
    mixers=(
        *("softmax", "linear", "mamba2", "gla", "deltanet", "gdn", "kda", "pdn", "pgdn", "pkda", "gka", "mesa"),
        *("palimpsa-d", "lattice:objective=similarity@lattice-similarity", "vla-conv", "rls"),
        "rls:decay=head@rls-decay",
    ),
    **LOSS,
)  # fmt: skip
# The library's own, in the order of lists and pages.
PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        RecallPart(
            name="recall",
            says="associative recall of mixed numbers of pairs, every rule in one block, by size of state",
            columns="{task}, heads of {head_dim}",
            **RECALL,
        ),
        RecallPart(
            name="recall-published",
            says="associative recall of mixed numbers of pairs, every rule in the block of its layer, by size of state",
            columns="{task}, heads of {head_dim}",
            **RECALL,
        ),
        RecallPart(
            name="recall-blocks",
            says="associative recall of mixed numbers of pairs with one part of the block changed",
            columns="{block}",
            **RECALL,
        ),
        RecallPart(
            name="tasks",
            says="state tracking, copying and palindromes, every rule in one block",
            columns="{task}, {pairs} tokens",
            **RECALL,
        ),
        TaskPart(
            name="regression-matched",
            says="in-context linear regression beside exact ridge regression, every rule in one block",
            measure="squared error",
            better="lower",
            value="error",
            columns="{inputs} inputs, {pairs} examples, noise {noise}",
        ),
        TaskPart(
            name="mqar",
            says="associative recall, queries shuffled and in order, by pairs and size of state",
            measure="accuracy",
            better="higher",
            value="accuracy",
            columns="{query_order}, {pairs} pairs, heads of {head_dim}",
        ),
        TaskPart(
            name="regression",
            says="in-context linear regression beside exact ridge regression",
            measure="squared error",
            better="lower",
            value="error",
            columns="{inputs} inputs, {pairs} examples, noise {noise}",
        ),
        TaskPart(
            name="tracking",
            says="state tracking: permutations composed",
            measure="accuracy",
            better="higher",
            value="accuracy",
            columns="{task}, {pairs} tokens",
        ),
        PROXIES,
        MatchedLanguagePart(
            name="language-matched",
            says="language models of code in one block, by tokens of training: test text, identifiers, long contexts, needles",
            mixers=PROXIES.mixers,
            proxies=PROXIES,
            **LOSS,
        ),
        MatchedLanguagePart(
            name="hybrids",
            says="memories with softmax attention in some of the layers: the same models of code in one block",
            # Those that are in published hybrids; others by their names.
            mixers=("mamba2", "gdn", "kda"),
            proxies=PROXIES,
            **LOSS,
        ),
        LanguagePart(
            name="language",
            says="perplexity by context length of one language model",
            measure="perplexity",
            better="lower",
            value="loss",
        ),
        TrainingSpeed(
            name="training-speed",
            says="tokens per second of a training step of 24 layers",
            measure="tokens per second",
            better="higher",
        ),
        DecodingSpeed(
            name="decoding-speed",
            says="tokens per second of decoding with 24 layers",
            measure="tokens per second",
            better="higher",
        ),
        Memory(
            name="memory",
            says="state of a sequence and activations of a training step",
            measure="bytes",
            better="lower",
        ),
        RulesPart(
            name="rules",
            says="memory rules without training: distance from exact least squares on random streams",
            measure="distance",
            better="lower",
            value="distance",
        ),
    )
}


def known_parts() -> dict[str, Part]:
    """The library's parts, and one that trains on each task of a user's own."""
    parts = dict(PARTS)
    for name, task in TASKS.items():
        if not task.__module__.startswith("fastweights."):
            parts.setdefault(
                name,
                TaskPart(
                    name=name,
                    says=task.summary,
                    measure="accuracy" if task.measure == "accuracy" else "squared error",
                    better="higher" if task.measure == "accuracy" else "lower",
                    value=task.measure,
                ),
            )
    return parts


@checked
def find_part(name: str) -> Part:
    """The part of a name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    parts = known_parts()
    check_choice("part", name, parts)
    return parts[name]
