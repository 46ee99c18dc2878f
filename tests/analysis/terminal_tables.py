"""Tables of every kind with long names and numbers, for the tests of their widths."""

import dataclasses
import io
import re

from rich.console import Console, Group
from rich.table import Table

from fastweights.analysis import mixers_table, recall_table
from fastweights.analysis.mixer_tables import mixer_page
from fastweights.analysis.tables import evaluation_tables, language_tables
from fastweights.results import HarnessScore, LengthPerplexity, NeedleRecall, WordRecall

from ..results.made_up import TRAINED, made_up

LENGTHS = [2**power for power in range(9, 18)]
LABEL = "gdn:conv_size=2,expand_v=2,negative_eigenvalues=true"
SIZES = {"parameters": 340_123_456, "state_size": 12_345_678}


def recall_tables():
    names = ("linear", "palimpsa-d", LABEL)
    yield recall_table(
        [
            made_up(mixer, pairs, rate, seed, None if mixer == "linear" and seed else 0.1, undertrained=True, **SIZES)
            for mixer in names
            for pairs in (4, 128)
            for rate in (0.003, 0.00123)
            for seed in (0, 1)
        ]
    )


def trainings():
    entries = [{"length": length, "loss": 9.0, "last_loss": 1.0, "texts": 3, "joined": 0} for length in LENGTHS]
    yield from language_tables([dataclasses.replace(TRAINED, name="palimpsa-m", perplexities=entries, **SIZES)])


def evaluations():
    needles = {"task": "s-niah-1", "depth": 0.5, "examples": 4, "found": 0.25, "exact": 0.25, "answer_loss": 11.5}
    words = {"task": "mqar-shuffled", "pairs": 8, "symbols": 64, "examples": 4, "accuracy": 0.625, "chance": 0.1}
    yield from evaluation_tables(
        {
            "perplexity": [
                LengthPerplexity(length=length, loss=11.0, last_loss=11.0, texts=16, joined=3) for length in LENGTHS
            ],
            "mqar-shuffled": [WordRecall(length=length, **words) for length in LENGTHS],
            "s-niah-1": [NeedleRecall(length=length, **needles) for length in LENGTHS],
            "lm-eval": [HarnessScore(task="a_task_with_a_long_name" * 3, metric="acc_stderr,none", value=0.5)],
        }
    )


TABLES = {
    "recall": (recall_tables, [LABEL, "340,123,456", "12,345,678", "0.00123", "2 of 4 runs diverged", "undertrained"]),
    "train": (trainings, ["palimpsa-m", "340,123,456", "12,345,678", "131,072 tokens", "8103"]),
    "evaluate": (evaluations, ["131,072", "59,874.14", "11.0000", "0.625", "0.25 (11.50)", "acc_stderr,none"]),
    "mixers": (lambda: [mixers_table(), mixer_page("gdn")], ["palimpsa-d", "H K (V + K + 1)", "negative_eigenvalues"]),
}


def lines(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()


def plain_tables(found):
    for one in found:
        if isinstance(one, Group):
            yield from (part for part in one.renderables if isinstance(part, Table) and part.columns[0].header)
        else:
            yield one


def check_no_number_is_split(found, width):
    """On a terminal of this width every number of every table is whole, and none is lost."""
    tables = list(plain_tables(found))
    assert tables
    for table in tables:
        numbers = [
            word
            for column in table.columns
            for text in (column.header, *column.cells)
            for word in str(text).split()
            if column.justify == "right" or re.fullmatch(r"[\d.,()±%]+", word)
        ]
        shown = lines(table, width)
        assert all(len(line) <= width for line in shown)
        words = {}
        for word in " ".join(shown).split():
            words[word] = words.get(word, 0) + 1
        for word in set(numbers):
            assert words.get(word, 0) >= numbers.count(word), (word, "\n".join(shown))
