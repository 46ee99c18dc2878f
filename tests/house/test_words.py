"""Plain English: phrases and names that this project used for itself, where practitioners have words of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

# "one decay per head": what is counted, "a", and the unit that it is counted by.
COUNTED = (
    "one|ones|number|numbers|decay|decays|gain|gains|gate|gates|key|keys|value|values|state|states|entry|entries|row|rows|"
    "token|tokens|ms|us|milliseconds|microseconds|seconds|bytes|loss|losses|nats|result|results|mixer|mixers|line|lines|"
    "cache|caches|process|processes|sequence|sequences|query|queries|head|heads|channel|channels|program|programs|warps|"
    "ridge|step|steps|point|points|panel|colour|factor|factors|text|texts|product|products|matmul|buffer|case|file|record|"
    "perplexity|run|runs|times|once|twice|model|column|columns|task|tasks"
)
UNIT = (
    "head|channel|token|second|step|layer|op|call|sequence|core|GPU|model|chunk|length|depth|mixer|row|query|document|"
    "multiprocessor|program|prompt|element|subcommand|block|worker|process|side|launch|kernel|column|segment|tile|seed|"
    "measure|task|metric|case|line|key|value|batch|rule|test|shape|warp"
)
DIALECT = {
    "per, not a": rf"\b(?:{COUNTED})`? an? (?:(?:key|value|q/k|context|LSTM) )?(?:{UNIT})\b",
    "go through": r"\bgo(?:ne|ing|es)?[ ]through[ ]with\b|\bby[ ]going[ ]through\b",
    "told by": r"\btold\b",
    "what is asked": r"\bwhat[ ]is[ ]asked\b|\basked[ ]for[ ]is\b",
    "so large": r"\bas[ ]large[ ]as[ ]that\b|\bso[ ]many[ ]of[ ]it\b",
    "a thing to be": r"\btensors?[ ]to[ ]be\b|\bbuffers?[ ]to[ ]be\b",
    "goes on": r"\bgo(?:es)?[ ]on\b",
    "side by side": r"\bside[ ]by[ ]side\b",
    "all that is left": r"\ball[ ]that[ ]is[ ]left[ ]to[ ]do\b",
    "to live as long": r"\bto[ ]live[ ]as[ ]long\b",
    "walk over chunks": r"\bwalks?[ ](?:over|through|back)\b",
    "in this many words": r"\bbegins?[ ]anew\b|\bwhat[ ]becomes[ ]of\b",
}
# Names of before the rename table of the design; each now has the field's word.
NAMES = (
    *("walk_back", "cumulate", "value_gradient", "make_ready", "newest_assembler", "name_as_before", "is_roomy"),
    *("call_of", "select_backend", "per_sequence", "remember", "arranged", "known_steps", "set_window"),
)
BANNED = {
    **DIALECT,
    "names of before": rf"\b(?:{'|'.join(NAMES)})\b",
    "old module path": r"\bops[./]_(?:triton|shared)\b",
}

TEXTS = ("*.py", "*.md", "*.toml", "*.json")
GENERATED = "results"  # measured numbers, and golden values


def places() -> list[str]:
    """Every package, every folder of tests, and the other folders and files that people read."""
    found = ["fastweights", "tests", "benchmarks", "docs", "examples", "README.md", "CHANGELOG.md", "Makefile"]
    for top in ("fastweights", "tests"):
        found += [str(path.relative_to(ROOT)) for path in sorted((ROOT / top).iterdir()) if path.is_dir()]
    return [name for name in found if not name.endswith("__pycache__") and (ROOT / name).exists()]


def files(place: str) -> list[Path]:
    """The text files of a place. Of fastweights and tests only those that lie directly in them: their folders are places."""
    path = ROOT / place
    if path.is_file():
        return [path]
    search = path.glob if place in ("fastweights", "tests") else path.rglob
    found = {file for pattern in TEXTS for file in search(pattern)}
    return sorted(
        file for file in found if HERE not in file.parents and GENERATED not in file.relative_to(path).parts[:-1]
    )


def flat(text: str) -> str:
    """The text with its line breaks, comment marks and indents as single spaces, so that a phrase may run over lines."""
    return re.sub(r"\s*\n\s*(?:#:? ?)?", " ", text)


def banned_phrases(text: str) -> list[str]:
    joined = flat(text)
    return [
        f"{rule}: {found.group()}"
        for rule, pattern in BANNED.items()
        for found in re.finditer(pattern, joined, re.IGNORECASE)
    ]


@pytest.mark.parametrize("place", places())
def test_no_private_dialect(place: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {phrase}" for file in files(place) for phrase in banned_phrases(file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "one decay a head",
        "a decay a key channel",
        "one number\n    # a token",
        "9.1 ms a call",
        "it costs 3 bytes an element",
        "one `LayerCache` a layer".replace("LayerCache` ", "Layer cache "),
        "Training goes on afterwards",
        "both run side\nby side",
        "from fastweights.ops._triton import x",
        "cumulate(g)",
        "told by its buffers",
    ],
)
def test_dialect_is_found(text: str) -> None:
    assert banned_phrases(text)


@pytest.mark.parametrize(
    "text", ["one decay per head", "a head of one layer", "gone on a sidewalk", "accumulate(g)", "one of a row"]
)
def test_plain_english_is_not(text: str) -> None:
    assert not banned_phrases(text)
