"""The memories by need, by mechanism, by cost and by the papers' claims: sections of docs/leaderboard.md, from the result files
and the declarations of the mixers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from fastweights.layers import MIXERS
from fastweights_studies.claims import PAPERS, STATUSES, ClaimRecord, find_claim
from fastweights_studies.leaderboard import PARTS, Part
from fastweights_studies.leaderboard.cells import format_number
from fastweights_studies.leaderboard.entries import EXACT
from fastweights_studies.leaderboard.measured import ReadPart
from fastweights_studies.leaderboard.tables import Cell
from fastweights_studies.measure.models import FLA, Model
from fastweights_studies.pages import claims, evidence
from fastweights_studies.pages.evidence import RESULTS
from fastweights_studies.pages.rendering import least_to_most, table
from fastweights_studies.pages.results import read_measured

MOST_TIED = 9  # memories that a cell names
COLUMNS = {
    "recall": "mqar-shuffled, heads of 32", "regression": "16 inputs, 64 examples, noise 0.0", "tracking": "s3, 32 tokens",
    "language": "held out",
}  # fmt: skip

# What one may need, and the part and the column of the leaderboard that measure it.
NEEDS = {
    "recall of many pairs, in one block": ("recall", COLUMNS["recall"]),
    "regression in context": ("regression", COLUMNS["regression"]),
    "state tracking": ("tracking", COLUMNS["tracking"]),
    "language modelling": ("language", COLUMNS["language"]),
    "fast training": ("training-speed", "8 sequences of 2,048 tokens"),
    "fast decoding of many sequences": ("decoding-speed", "64 sequences"),
    "a small state": ("memory", "state of a sequence, MB"),
    "little memory in training": ("memory", "activations of 8 sequences of 2,048 tokens, MB"),
}
# Baselines of Variational Linear Attention, here to test its claims (docs/rules.md, "Built to fail").
BASELINES = ("vla-softmax", "vla-linear", "vla-deltanet")
SHORT = {"recall": "recall", "regression": "squared error", "tracking": "tracking", "language": "perplexity"}

# What memories do, and one that does it. No measurement chooses them.
MECHANISMS = {
    "a delta rule, which overwrites the value of a key, with one decay per head": "gdn",
    "the same with one decay per key channel": "kda",
    "write keys that adapt to the scale of the key channels": "pgdn",
    "the exact regression on all keys so far, without a solver": "rls",
    "regression with a decay of old tokens, solved for every query": "gka",
    "protection of memory elements that many keys have written to": "palimpsa-d",
    "unit slots that change only orthogonally to their content": "lattice",
    "access to every past token": "softmax",
}


def speed(name: str, batch: int, results: Path, context: int | None = None) -> str:
    found = evidence.speed(name, batch, context, results)
    return "–" if found is None else f"{found:,.0f}"


def step_ratio(name: str, results: Path) -> tuple[float, Model] | None:
    """Time of a training step over that of the model beside it, run in the same way, and this model: of 24 layers compiled by
    blocks and replayed where there are any, as `fastweights train` runs them, and of several the newest.

    Hybrids do not count: their ratio is that of one of their mixers, and says nothing about the other. Nor do models of
    flash-linear-attention, which docs/performance.md compares, or with an MLP of another width.
    """
    found = [
        (step, base)
        for step, base in evidence.training_steps(name, results)
        if base is not None
        and step.model.way == base.model.way
        and step.model.mixers() == {name}
        and FLA not in (step.model.library, base.model.library)
        and step.model.mlp is None
    ]
    if not found:
        return None
    step, base = max(found, key=lambda pair: (*way_rank(pair[0].model), pair[0].origin.date))
    return evidence.ratio_of(step, base), base.model


def way_rank(model: Model) -> tuple[bool, bool]:
    """The more, the nearer a model is run to what `fastweights train` does."""
    return model.way == ("blocks", True), model.replayed and not model.compiled


def step_cell(name: str, results: Path) -> str:
    """A training step relative to that of the named model, and whether both were called eagerly."""
    if name == "gdn":
        return "1"
    found = step_ratio(name, results)
    if found is None:
        return "–"
    ratio, base = found
    eager = " (eager)" * (base.way == (None, False))
    return f"{ratio:.2f} of `{base.preset or base.mixer}`{eager}"


def leaders(found: Mapping[str, Cell]) -> list[str]:
    """The first memory and those behind it that are in the same place, or, where seeds give no places, of the same number, down
    to the first that is not: one below that ties only because its seeds lie far apart."""

    def rank(cell: Cell) -> object:
        return format_number(cell.mean) if cell.place is None and cell.mean is not None else cell.place

    best = rank(next(iter(found.values())))
    return [name for name, _ in itertools.takewhile(lambda one: rank(one[1]) == best, found.items())]


def named(names: list[str], texts: Mapping[str, str]) -> str:
    """Memories with what is said of them; once for all of them where it is the same."""
    different = {texts[name] for name in names}
    if len(names) > 1 and len(different) == 1:
        return f"{', '.join(f'`{name}`' for name in names)}: {different.pop()} each"
    return ", ".join(f"`{name}` {texts[name]}" for name in names)


def text_of(found: Mapping[str, Cell], name: str) -> str:
    return found[name].text if name in found else "–"


def in_tasks(name: str, results: Path, but: str = "") -> str:
    """The numbers of a memory in the columns of COLUMNS, without the part `but`."""
    cells = {
        SHORT[part]: text_of(evidence.board(part, results).get(column, {}), name)
        for part, column in COLUMNS.items()
        if part != but
    }
    return ", ".join(f"{what} {cell}" for what, cell in cells.items())


def seeds(part: str, column: str, results: Path) -> str:
    """How many seeds the rows of a column have, or that a measurement was run once."""
    if isinstance(PARTS[part], ReadPart):
        return "one run"
    entries = evidence.full_entries(part, results)
    counts = sorted({len(entry.values) for entry in entries if entry.column == column and entry.values})
    return "one seed" if counts == [1] else f"{least_to_most(counts)} seeds"


def needs(results: Path) -> str:
    """What one may need, the memories that measured best, and what the best one has elsewhere."""
    rows, led = [], []
    for need, (part, column) in NEEDS.items():
        found = evidence.board(part, results).get(column, {})
        learned = {name: cell for name, cell in found.items() if cell.has_learned}
        numbers = {name: cell for name, cell in learned.items() if name not in BASELINES}
        led += [f"{need} (`{name}` {learned[name].text})" for name in [*learned][:1] if name in BASELINES]
        row = [need, f"{part}: {column}"]
        if numbers:
            row += best_and_next(part, numbers, results)
        else:
            row += ["none is better than guessing" if found else "not measured yet", "", ""]
        rows.append([*row, f"{len(found)} of {len(MIXERS)}, {seeds(part, column, results)}" if found else ""])
    rows.append(unknown_keys(results))
    leading = f"They have the best number in {' and '.join(led)}." if led else ""
    text = f"""First the best of a column at full size and those behind it that tie with it, down to the first that does not, then
the next two, then what the best one has in the other tasks. Where mixers have one seed there is no ranking, and the three
highest numbers stand in the second place; where more than {MOST_TIED} tie in a task, the two best means. Tasks and language are
at equal state. Recall has every rule in one block; regression, tracking and language have the layers as published, whose blocks
[explain much](block.md). Speed and memory are of 24 layers with 8 heads of 128 channels, whose states differ. Other columns have
other leaders. Marks: \\* still learning (not marked for language models), ! some runs diverged, ° no better than guessing.

Left out are {", ".join(f"`{name}`" for name in BASELINES)}, baselines of one paper, of which two
[fail by what they compute](rules.md#built-to-fail).
{leading}
"""
    head = ["you need", "measured by", "best", "next", "the best one elsewhere", "memories, seeds"]
    return f"## By what you need\n\n{text}\n{table(head, rows)}"


def best_and_next(part: str, numbers: Mapping[str, Cell], results: Path) -> list[str]:
    """The best memories of a column, the next two and what the best one has elsewhere; or why there is no best one."""
    texts, best = {name: cell.text for name, cell in numbers.items()}, leaders(numbers)
    if PARTS[part].trained and numbers[best[0]].place is None:
        return ["no ranking: one seed", named([*numbers][:3], texts), ""]
    tied = sum(cell.place == numbers[best[0]].place for cell in numbers.values())
    if PARTS[part].trained and tied > MOST_TIED:
        return [f"{tied} tie", named(best[:2], texts), ""]
    after = [name for name in numbers if name not in best][:2]
    return [named(best, texts), named(after, texts), in_tasks(best[0], results, part)]


def mechanisms(results: Path) -> str:
    """One memory for each mechanism, with its numbers for every task."""
    boards = {part: evidence.board(part, results) for part in COLUMNS}
    rows = []
    for mechanism, name in MECHANISMS.items():
        rows.append(
            [
                mechanism, f"`{name}`", *(text_of(boards[part].get(column, {}), name) for part, column in COLUMNS.items()),
                lowest(name, boards["recall"]), decoding(name, results),
                step_cell(name, results),
            ]
        )  # fmt: skip
    text = """One memory stands for each mechanism. No measurement chose it, and its numbers show where it is poor. The columns
of tasks are [these](#one-column-of-each-task). The lowest recall is the worst of its columns of recall. Decoding:
tokens per second for 64 sequences. A training step is relative to that of the named model ([all memories](#all-memories)).
"""
    after = (
        "Two cases need no choice: a model of transformers with a gated delta rule keeps its memory and "
        "[gets faster](transformers.md), and a trained Mamba-2, Gated DeltaNet or linear model "
        "[continues](commands.md#convert) as one of its relatives.\n"
    )
    head = ["mechanism", "memory", *SHORT.values(), "lowest recall", "decoding", "training step"]
    return f"## By mechanism\n\n{text}\n{table(head, rows)}\n{after}"


def lowest(name: str, columns: Mapping[str, Mapping[str, Cell]]) -> str:
    """The lowest accuracy of a memory in the columns of a part, and the column."""
    cells = {column: found[name] for column, found in columns.items() if name in found}
    if not cells:
        return "–"
    column = min(cells, key=lambda column: cells[column].mean or 0.0)
    return f"{cells[column].text} ({column})"


def decoding(name: str, results: Path) -> str:
    """Tokens per second for 64 sequences, of softmax attention by context."""
    if evidence.speed(name, 64, None, results) is not None:
        return speed(name, 64, results)
    contexts = {length: speed(name, 64, results, length) for length in (2048, 16384)}
    return ", ".join(f"{found} at {length:,} tokens" for length, found in contexts.items() if found != "–") or "–"


def unknown_keys(results: Path) -> list[str]:
    """The row of variances that rank keys which were never written, of the result that measured them."""
    need, by = "a variance that ranks keys which were never written", "AUROC ([two sizes of a task](own-confidence.md))"
    records = evidence.records_of(results)
    if "own-2" not in records:
        return [need, by, "not measured yet", "", "", ""]
    sizes = [records[size].measurement for size in ("own-2", "own-2-cuda") if size in records]

    def means(name: str, by: str) -> list[float]:
        return [size.mean("new_keys_auroc", name, score=by) for size in sizes]

    def ranked(name: str, by: str) -> str:
        return ", at the larger size ".join(f"{mean:.3f}" for mean in means(name, by))

    found = {name: ranked(name, "variance") for name in ("rls", "palimpsa-d")}
    best, other = sorted(found, key=lambda name: found[name], reverse=True)
    probability = ranked(best, "probability")
    better = "; there the probability ranks them better" * (
        means(best, "probability")[-1] > means(best, "variance")[-1]
    )
    return [
        need, by, f"{named([best], found)}; by the probability of its answer {probability}{better}", named([other], found),
        in_tasks(best, results), f"2 of {len(MIXERS)}, {len(records['own-2'].seeds)} seeds",
    ]  # fmt: skip


def all_memories(results: Path) -> str:
    rows = []
    for name in MIXERS:
        state = evidence.layer(name).state_size(2048)
        grows = state != evidence.layer(name).state_size(2047)
        measured = [speed(name, batch, results, 2048 if grows else None) for batch in (1, 64)]
        rows.append(
            [
                f"`{name}`", f"{state / 1e3:,.0f}", *measured, step_cell(name, results), evidence.kernels(name),
            ]
        )  # fmt: skip
    head = ["memory", "state", "decode, 1", "decode, 64", "training step", "GPU kernels"]
    text = f"""- State: thousands of numbers per sequence and layer, {evidence.HEADS} heads of 128 channels, after 2,048 tokens.
- Decode: tokens per second for 1 and for 64 sequences, 24 such layers on one H200. `softmax` and `vla-softmax` have 2,048
  tokens of context ([all contexts](performance.md)).
- Training step: time relative to the named model, mostly 24 layers of `gdn`. Both were run in the same way: compiled by
  blocks and replayed, or eager where that is said. [performance.md](performance.md) has the times in milliseconds, and those of
  flash-linear-attention.
- A dash means not measured.
"""
    return f"## All memories\n\n{text}\n{table(head, rows)}"


def boards(results: Path) -> str:
    """One column of each trained part of the leaderboard at full size."""
    columns = [evidence.board(part, results).get(column, {}) for part, column in COLUMNS.items()]
    lines = [[f"`{name}`", *(text_of(found, name) for found in columns)] for name in MIXERS]
    regression = evidence.full_entries("regression", results)
    exact = next((f"{entry.of(EXACT)[0]:.3f}" for entry in regression if entry.column == COLUMNS["regression"]), "–")
    text = f"""Equal state and equal parameters, the same data and grid of learning rates; numbers without ± are of one seed, so
small differences mean nothing. Recall has every rule in one block; the other columns have the layers as published. Recall and
state tracking: accuracy. Regression: squared error; exact ridge regression has {exact}. Language: perplexity, with the place in
parentheses, = for a tie. Marks: \\* still learning (not marked for language models), ! some runs diverged, ° no better than
guessing. The [leaderboard](leaderboard.md) explains them, and has sizes and the other columns.
"""
    heads = [f"{part}: {column}" for part, column in COLUMNS.items()]
    return f"## One column of each task\n\n{text}\n{table(['memory', *heads], lines)}"


def papers(results: Path) -> str:
    rows, records = [], evidence.records_of(results)
    for paper, title in PAPERS.items():
        found = evidence.claims_of_paper(paper, results)
        rows.append([title, *(", ".join(link(name, records) for name in found.get(status, [])) for status in STATUSES)])
    text = (
        "What each paper claims about its memory, tested here. A claim holds or fails at the sizes of its experiment.\n"
        f"{claims.NOTED}: the claim has a note on what its outcome does not show.\n"
    )
    return f"## What the papers claim\n\n{text}\n{table(['paper', *STATUSES], rows)}"


def link(name: str, records: Mapping[str, ClaimRecord]) -> str:
    """To a claim, with the mark of those that have a note."""
    return f"[{name}](claims.md#{name.lower()}){claims.mark(find_claim(name), records)}"


def gaps(results: Path) -> str:
    undecoded = [name for name in MIXERS if not evidence.decoding(name, results)]
    untimed = [name for name in MIXERS if not evidence.training_steps(name, results)]
    missing = [text for name in evidence.TRAINED if (text := missing_of(PARTS[name], results))]
    items = [
        *(
            [
                "At equal state size and equal parameters, at the full size of the [leaderboard](leaderboard.md): "
                f"{', '.join(missing)}."
            ]
            if missing
            else []
        ),
        *([f"Decoding speed: {which(undecoded)}."] if undecoded else []),
        *([f"Training steps of whole models: {which(untimed)}."] if untimed else []),
        f"Training steps on other GPUs than {devices('training-steps', 'training_step', results)}, decoding on others than "
        f"{devices('decode-table', 'decode_table', results)}.",
    ]
    return "## Not measured yet\n\n" + "".join(f"- {item}\n" for item in items)


def missing_of(part: Part, results: Path) -> str:
    """A trained part of the leaderboard and how much of its full size is missing; empty where nothing is."""
    found = len(evidence.full_entries(part.name, results))
    if not found:
        return part.name
    wanted = len(part.setting("full")) * len(MIXERS)
    return f"{part.name} ({wanted - found} of {wanted} numbers)" if found < wanted else ""


def which(missing: list[str]) -> str:
    """These mixers, or all but the others, whichever is shorter."""
    there = [name for name in MIXERS if name not in missing]
    names = min(missing, there, key=len)
    listed = ", ".join(f"`{name}`" for name in names)
    return listed if names is missing else f"all but {listed}" if there else "all"


def devices(file: str, task: str, results: Path) -> str:
    """The GPUs that rows are from."""
    found = sorted({row.origin.device for row in read_measured(file, task, results)})
    return " and ".join(found) or "none"


def sections(results: Path = RESULTS) -> list[str]:
    """What the page of the leaderboard says of the memories beside the tables of its parts."""
    return [part(results) for part in (needs, mechanisms, all_memories, boards, papers, gaps)]
