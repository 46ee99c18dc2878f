"""The page of a memory and docs/leaderboard.md say what declarations and results say."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from fastweights_studies.claims import claims_of, load_record, save_record
from fastweights_studies.leaderboard import PARTS, part_rows
from fastweights_studies.leaderboard.cells import format_number
from fastweights_studies.leaderboard.tables import Cell
from fastweights_studies.pages import choosing, evidence, memories, mixer_pages, own_results
from fastweights_studies.pages.matched_rules import compare_with_reference
from fastweights_studies.pages.rendering import anchor
from fastweights_studies.pages.results import read_measured, value_of
from fastweights_studies.places import DOCS
from fastweights_studies.record import read_rows, select, write_rows

from fastweights.layers import MIXERS
from fastweights.layers.choice import described_options
from studies.tests.documentation.site import pages
from studies.tests.leaderboard.toy import make_row


def page(name: str) -> str:
    return pages()[f"docs/mixers/{name}.md"]


PAGE = DOCS / "leaderboard.md"


@pytest.mark.parametrize("name", MIXERS)
def test_a_page_has_what_is_declared(name: str) -> None:
    text, spec = page(name), MIXERS[name]
    for part in (spec.equation, spec.source, spec.state, spec.layer.__name__, spec.cost or "not stated"):
        assert part.replace("|", "\\|") in text or part in text, part
    for heading in (f"# {name}", "## Shapes", "## Evidence", "## Departures from the paper", "## Options"):
        assert f"{heading}\n" in text, heading
    if "softmax" not in name:
        memory = evidence.layer(name).state_spec().memory
        for key, x in memory.items():
            assert f"| memory | `{key}` | {list(x.shape[1:])} |" in text
        op = evidence.rules_of(name)[-1]
        assert anchor(mixer_pages.heading_of(op, mixer_pages.RULES_PAGE.read_text())) in text


def test_every_mixer_declares_its_departures() -> None:
    """Each of the library's mixers has a list, or one item that says that there are none; nothing else is listed."""
    declared = mixer_pages.departures(mixer_pages.RULES_PAGE.read_text())
    own = [name for name, spec in MIXERS.items() if spec.layer.__module__.startswith("fastweights.")]
    assert sorted(declared) == sorted(own)
    for name, items in declared.items():
        assert len(items) == 1 or not any(item.startswith("None") for item in items), name
        assert len(set(items)) == len(items) and all(f"\n- {item}\n" in page(name) for item in items), name
        assert page(name).partition("## Departures from the paper\n")[2].count("\n- ") == len(items), name


def test_departures_are_those_of_the_layers() -> None:
    """What the items say of default options, of the layers themselves."""
    defaults = {name: {option.name: option.default for option in described_options(MIXERS[name])} for name in MIXERS}
    for name, item, option, default in (
        ("retnet", "rotation of q and k is left out", "decay", "fixed"),
        ("linear", "There is no feature map ELU + 1", "feature_map", "identity"),
        ("linear", "no divisor z.q", "normalizer", "false"),
        ("gla", "pass a short convolution and SiLU, and q and k have unit length", "normalize_qk", "true"),
        ("mamba2", "The skip D starts at 0", "skip_init", "0.0"),
        ("palimpsa-m", "The skip D starts at 0", "skip_init", "0.0"),
        ("palimpsa-m", "Every head has q and k of its own", "num_groups", "none"),
        ("palimpsa-d", "The first windows rise over the heads", "long_memory", "none"),
        ("gka", "The first windows rise over the heads", "long_memory", "none"),
        ("palimpsa-d", "The skip D starts at 0", "skip_init", "0.0"),
        ("palimpsa-d", "start uniform", "conv_init", "uniform"),
        ("comba", "There is no output gate", "output_gate", "none"),
        ("comba", "q and k have unit length before", "normalize_qk", "true"),
        ("comba", "d starts at 0.02", "output_correction", "0.02"),
        ("gdn", "There is no output gate", "output_gate", "none"),
        ("pdn", "starts at -0.2", "center", "-0.2"),
        ("pmamba2", "A ridge is added to A", "ridge", "0.1"),
        ("pmamba2", "A has a decay and a gain of its own", "tie_preconditioner", "false"),
        ("pgdn", 'With squash "none"', "tie_preconditioner", "false"),
        ("lattice", "SiLU follows the convolutions", "activation", "silu"),
        ("vla-deltanet", "It is equation 4", "normalize_qk", "false"),
    ):
        assert item in page(name) and defaults[name][option] == default, (name, option, defaults[name][option])
    assert "The centre c is free in sign" not in page("pmamba2") and "rotation" not in page("gla")
    assert "None. It was compared with table 2" in page("efla") and "lists none" not in page("linear")


def test_departures_have_one_form() -> None:
    head = f"# Rules\n\n## {mixer_pages.DEPARTURES}\nWords.\n\n"
    text = f"{head}- `a`, `b-c`: One\n  thing.\n- `a`: Another.\n\n## Other\n- not `b-c`: this.\n"
    assert mixer_pages.departures(text) == {"a": ["One thing.", "Another."], "b-c": ["One thing."]}
    for item in ("Another.", "a: Another.", "`a` another.", "`a`, b: Another.", "`a`:"):
        with pytest.raises(ValueError, match="must be '- `mixer`, `mixer`: text'"):
            mixer_pages.departures(f"{head}- {item}\n")
    with pytest.raises(ValueError, match="needs a section"):
        mixer_pages.heading_of("no_such_op", "\n## Rules: `an_op`\n")


@pytest.mark.slow
def test_numbers_are_those_of_the_results(tmp_path: Path) -> None:
    shutil.copytree(evidence.RESULTS, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("decode-table-*.json"):
        rows = read_rows(path)
        changed = select(rows, mixer="gdn", measure="tokens_per_second", column={"batch": 64})
        dropped = select(rows, mixer="kda", column={"batch": 64})
        assert len(changed) == 1 and len(dropped) == 3
        rows = [
            dataclasses.replace(row, value=98765.0) if row in changed else row for row in rows if row not in dropped
        ]
        write_rows(path, rows)
    for claim in (tmp_path / "claims").glob("C5.json"):
        claim.unlink()
    change_auroc(tmp_path / "claims", "own-2", 0.123, "rls", score="variance")
    for path in (tmp_path / "leaderboard").glob("*-full.json"):
        path.unlink()
    column = select(PARTS["tracking"].library("full", ()), column={"task": "parity"})
    write_rows(tmp_path / "leaderboard" / "tracking-full.json", column)
    text = "\n".join(memories.sections(tmp_path))
    small, large = (evidence.records_of(tmp_path)[name].measurement for name in ("own-2", "own-2-cuda"))
    by_variance, by_probability = (
        ", at the larger size ".join(
            f"{size.mean('new_keys_auroc', 'palimpsa-d', score=by):.3f}" for size in (small, large)
        )
        for by in ("variance", "probability")
    )
    better = "; there the probability ranks them better"
    cell = f"| `palimpsa-d` {by_variance}; by the probability of its answer {by_probability}"
    assert f"{cell}{better} | `rls` 0.123, at" in text
    (tmp_path / "other").mkdir()
    shutil.move(tmp_path / "claims", tmp_path / "other" / "claims")
    change_auroc(tmp_path / "other" / "claims", "own-2-cuda", 0.5, "palimpsa-d", score="probability")
    assert memories.unknown_keys(tmp_path / "other")[2].endswith(", at the larger size 0.500")
    assert (
        "mqar, regression, tracking (75 of 108 numbers), language-proxies, language-matched, hybrids, language." in text
    )
    assert "| fast decoding of many sequences | decoding-speed: 64 sequences | `gdn` 98,765 | `linear` 54,420" in text
    assert "| state tracking | tracking: s3, 32 tokens | not measured yet |" in text
    (gdn, kda) = (
        line.split(" | ") for line in text.splitlines() if re.search(r"one decay per (head|key) ?.* \| `", line)
    )
    assert gdn[-2] == "98,765" and kda[-2] == "–"
    assert "[C5](claims.md#c5)" in text.partition("## What the papers claim")[2].partition("\n## ")[0]
    assert (
        evidence.speed("gdn", 64, results=tmp_path) == 98765.0 and evidence.speed("kda", 64, results=tmp_path) is None
    )


def change_auroc(folder: Path, name: str, value: float, mixer: str, **column: str) -> None:
    """Another AUROC of keys that were never written, in a result of own-2."""
    record = load_record(folder / f"{name}.json")
    other = select(record.rows, measure="new_keys_auroc", mixer=mixer, column=column)
    assert other
    rows = [replace(row, value=value) if row in other else row for row in record.rows]
    save_record(folder, replace(record, rows=rows))


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The lines of the table of a section, as cells."""
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]


def shown(cell: str) -> list[tuple[str, str]]:
    """The mixers of a cell and what stands behind each: its own number, or the one of all."""
    names, each = (
        re.findall(r"`([\w-]+)`( [^,;`]\S*(?: ±\S+)?(?: \(\d+=?\))?\S*?)?(?=, |;|:|$)", cell),
        re.search(r": (\S+) each", cell),
    )
    return [(name, each[1] if each else number.strip()) for name, number in names]


def values_of(part: str, column: str) -> list[tuple[str, list[float]]]:
    """The mixers in a column and the values of their seeds, of the result files."""
    rows = part_rows(PARTS[part], "full", evidence.RESULTS / "leaderboard", evidence.RESULTS)
    return [
        (entry.label, [*entry.values]) for entry in PARTS[part].entries(rows) if entry.column == column and entry.values
    ]


def measured(part: str, column: str) -> dict[str, float]:
    """The means of the mixers in a column."""
    found: dict[str, list[float]] = {}
    for name, values in values_of(part, column):
        found.setdefault(name, []).append(statistics.fmean(values))
    return {name: (max if PARTS[part].better == "higher" else min)(means) for name, means in found.items()}


@pytest.mark.parametrize("need", memories.NEEDS)
def test_the_best_for_a_need_is_that_of_the_results(need: str) -> None:
    part, column = memories.NEEDS[need]
    (row,) = (row for row in rows_of(PAGE.read_text(), "By what you need") if row[0] == need)
    means = {name: mean for name, mean in measured(part, column).items() if name not in memories.BASELINES}
    ordered = sorted(means, key=lambda name: means[name], reverse=PARTS[part].better == "higher")
    best, after = shown(row[2]), shown(row[3])
    cells = [cell for name, cell in evidence.board(part)[column].items() if name in means and cell.has_learned]
    first = [cell.label for cell in itertools.takewhile(lambda cell: cell.place == cells[0].place, cells)]
    tied = sum(cell.place == cells[0].place for cell in cells)
    if PARTS[part].trained and cells[0].place is None:
        assert row[2] == "no ranking: one seed" and [name for name, _ in after] == ordered[:3] and not row[4]
    elif PARTS[part].trained and tied > memories.MOST_TIED:
        assert row[2] == f"{tied} tie" and [name for name, _ in after] == first[:2] and not row[4]
    else:
        assert len(after) == 2 and {name for name, _ in best} == set(ordered[: len(best)])
        left = [name for name in ordered if name not in dict(best)]
        assert {means[name] for name, _ in after} == {means[name] for name in left[:2]}
    for name, number in best + after:
        assert number == evidence.board(part)[column][name].text
        mean = math.exp(means[name]) if part == "language" else means[name]
        assert number.startswith(format_number(mean))
    assert row[1] == f"{part}: {column}" and row[5].startswith(
        f"{len(evidence.board(part)[column])} of {len(MIXERS)}, "
    )
    others = {other: board for other, board in memories.COLUMNS.items() if other != part}
    assert not best or row[4] == ", ".join(
        f"{memories.SHORT[other]} {memories.text_of(evidence.board(other)[board], ordered[0])}"
        for other, board in others.items()
    )


def test_baselines_that_are_left_out_are_named_where_they_lead() -> None:
    text = " ".join(PAGE.read_text().split())
    for need, (part, column) in memories.NEEDS.items():
        name, cell = next(iter(evidence.board(part)[column].items()))
        assert (f"{need} (`{name}` {cell.text})" in text) == (name in memories.BASELINES)
    assert (
        "They have the best number in state tracking (`vla-deltanet` 1.000 ±0.000 (1=)) and fast training (`vla-softmax`"
        in text
    )


def test_no_memory_leads_everywhere() -> None:
    rows = rows_of(PAGE.read_text(), "By what you need")
    assert not set.intersection(*({name for name, _ in shown(row[2])} for row in rows if shown(row[2])))
    for part in ("mqar", "tracking"):
        assert len({next(iter(found)) for found in evidence.board(part).values()}) > 1


def test_a_mechanism_has_the_numbers_of_its_memory_where_they_are_poor_too() -> None:
    rows = {row[1].strip("`"): row for row in rows_of(PAGE.read_text(), "By mechanism")}
    assert list(rows) == list(memories.MECHANISMS.values())
    for name, row in rows.items():
        boards = [evidence.board(part)[column] for part, column in memories.COLUMNS.items()]
        assert row[2:6] == [board[name].text if name in board else "–" for board in boards]
        recalls = {column: found[name] for column, found in evidence.board("recall").items() if name in found}
        lowest, _, column = row[6].rpartition(" (") if recalls else (row[6], "", "")
        assert lowest == (recalls[column[:-1]].text if recalls else "–")
        assert not recalls or recalls[column[:-1]].mean == min(cell.mean for cell in recalls.values())
    assert rows["lattice"][2] == rows["lattice"][6] == "–"


def test_leaders_are_the_first_place_or_the_best_number() -> None:
    def cells(**numbers: tuple[float, int | None]) -> dict[str, Cell]:
        return {name: Cell(label=name, text="", mean=mean, place=place) for name, (mean, place) in numbers.items()}

    assert memories.leaders(cells(a=(8.1, 1), b=(8.2, 1), c=(8.3, 3), d=(8.3, 11))) == ["a", "b"]
    assert memories.leaders(cells(a=(8.1, 1), b=(8.2, 1), c=(8.3, 3), d=(8.9, 1))) == [
        "a",
        "b",
    ]  # d has seeds far apart
    assert memories.leaders(cells(b=(8.2, 2), c=(8.3, 2), d=(8.3, 21))) == ["b", "c"]  # the first is left out
    assert memories.leaders(cells(a=(0.9982, None), b=(0.9979, None), c=(0.997, None))) == ["a", "b"]
    assert memories.named(["a", "b"], {"a": "1.0", "b": "1.0"}) == "`a`, `b`: 1.0 each"
    assert memories.named(["a", "b"], {"a": "1.0", "b": "1.0!"}) == "`a` 1.0, `b` 1.0!"


def test_a_memory_that_guesses_is_not_the_best(tmp_path: Path) -> None:
    (tmp_path / "leaderboard").mkdir()
    column = memories.COLUMNS["tracking"]
    rows = [
        make_row("tracking", column=1, size="full", mixer=name, value=value)
        for name, value in (("gdn", 0.25), ("kda", 0.24))
    ]
    write_rows(tmp_path / "leaderboard" / "tracking-full.json", rows)
    assert [
        "state tracking",
        f"tracking: {column}",
        "none is better than guessing",
        "",
        "",
        "2 of 36, one seed",
    ] in rows_of(memories.needs(tmp_path), "By what you need")


def test_numbers_of_a_page_are_those_of_the_results(tmp_path: Path) -> None:
    decoding = read_measured("decode-table", "decode_table", evidence.RESULTS)
    for batch in (1, 8, 64):
        (row,) = select(decoding, mixer="gdn", measure="tokens_per_second", column={"batch": batch})
        assert f"| {row.origin.device} | {batch} | any | {row.value:,.0f} |" in page("gdn")
    steps = read_measured("training-steps", "training_step", evidence.RESULTS)
    one, base = (value_of(steps, "step_ms", column={"preset": name}) for name in ("pgdn-340m", "gdn-340m"))
    assert f"| {one:.0f} | {one / base:.2f} of `gdn-340m` |" in page("pgdn")
    first = read_measured("first_values", "first_values", evidence.RESULTS)
    other, chosen = sorted(select(first, mixer="retnet"), key=lambda row: bool(row.run["chosen"]))
    assert f"has 0.25): {chosen.value:.3f}" in page("retnet") and f"{other.value:.3f}" != f"{chosen.value:.3f}"
    changed = [replace(row, run={**row.run, "chosen": not row.run.get("chosen")}) for row in first]
    write_rows(tmp_path / "first_values.json", changed)
    assert evidence.first_recall("retnet", tmp_path) == other.value != evidence.first_recall("retnet")


def test_a_page_has_the_memory_s_numbers_on_the_leaderboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the best number of the column, with the marks and the place; other results are other numbers."""
    column = "16 inputs, 64 examples, noise 0.5"
    entries = PARTS["regression"].entries(PARTS["regression"].library("full", ()))
    errors = {entry.label: entry.mean for entry in entries if entry.column == column}
    best = min(errors, key=lambda name: errors[name])
    for name in ("gdn", "softmax"):
        line = next(line for line in page(name).splitlines() if f"| regression, squared error | {column} |" in line)
        assert f"| {errors[name]:.3f}" in line and line.endswith(f", `{best}` |") and f"| {errors[best]:.3f}" in line
        assert ("°" in line) is (name == "softmax")
    line = next(line for line in page("gdn").splitlines() if "| language, perplexity | held out |" in line)
    cell = r"\d\.\d{3} ±\d\.\d{3} \((\d+)=?\)"
    assert (found := re.search(rf"\| {cell} \| {cell}, `[\w-]+` \|$", line)) and found[2] == "1"

    (tmp_path / "leaderboard").mkdir()
    rows = [
        make_row(
            "tracking", size="full", column=column, mixer=mixer, seed=seed, value=value, undertrained=mixer == "gdn"
        )
        for column, mixer, values in ((0, "gdn", (0.5, 0.6)), (0, "kda", (0.9, 0.9)), (1, "pdn", (0.25,)))
        for seed, value in enumerate(values)
    ]
    write_rows(tmp_path / "leaderboard" / "tracking-full.json", rows)
    monkeypatch.setattr(mixer_pages.evidence, "board", functools.partial(evidence.board, results=tmp_path))
    head = "| part | column | this memory | best number |\n| --- | --- | --- | --- |\n"
    for name, line in {
        "gdn": "| tracking, accuracy | parity, 32 tokens | 0.550 ±0.050 (1=)\\* | 0.900 ±0.000 (1=), `kda` |\n",
        "pdn": "| tracking, accuracy | s3, 32 tokens | 0.250° | 0.250°, `pdn` |\n",
    }.items():
        assert mixer_pages.leaderboard(name).endswith(head + line)
    assert mixer_pages.leaderboard("mesa") == "Leaderboard at full size: not measured yet.\n"


def test_what_is_not_measured_is_said() -> None:
    gaps = PAGE.read_text().partition("## Not measured yet")[2]
    for name in MIXERS:
        measured = bool(evidence.decoding(name))
        assert ("Decoding speed: not measured yet" in page(name)) is not measured
        line = next((line for line in gaps.splitlines() if line.startswith("- Decoding speed")), "")
        assert (f"`{name}`" in line) is not measured


def test_steps_are_those_of_models_with_the_mixer() -> None:
    assert "| `pgdn-340m` | 16 x 2,048 |" in page("pgdn") and "of `gdn-340m`" in page("pgdn")
    assert "| `24 layers of pgdn, replayed` | 8 x 2,048 |" in page("pgdn")
    assert "`gka-hybrid-2.8b`" in page("softmax") and "`24 layers of lattice-encode`" in page("lattice")
    newest, base = memories.step_ratio("pgdn", evidence.RESULTS)
    found = [
        (step.origin.date, evidence.ratio_of(step, base))
        for step, base in evidence.training_steps("pgdn")
        if base is not None and step.model.preset is None and step.model.way == ("blocks", True)
    ]
    assert len(found) == 2 and max(found)[1] == newest and base.mixer == "gdn"
    text = PAGE.read_text()
    assert f"| {newest:.2f} of `gdn` |" in text
    alone, base = memories.step_ratio("softmax", evidence.RESULTS)
    assert base.mixer == "gdn" and memories.step_cell("softmax", evidence.RESULTS) == f"{alone:.2f} of `gdn`"
    assert memories.step_ratio("gdn", evidence.RESULTS) is None  # flash-linear-attention's is beside it


def test_claims_stand_with_the_memories_that_they_are_about() -> None:
    about = {name: [claim.name for claim, _ in evidence.claims_about(name)] for name in MIXERS}
    assert {"C1", "C5", "S2"} <= set(about["pgdn"]) and "C16" in about["vla"] and "C16" not in about["gdn"]
    assert "C28" in about["gka"] and "C28" in about["gdn"] and "C28" in about["mamba2"]
    assert "| [C16](../claims.md#c16) | **does not hold** |" in page("vla")
    assert "the ledger has none" in page("ttt")
    assert about["rls"] == ["C1", "C5"] and "C5" in about["vla"] and "C5" not in about["gdn"]


def test_a_page_has_the_results_of_our_own_that_train_its_memory() -> None:
    """With the status of each size. The memories of a result are those that its numbers name."""
    records = evidence.records_of(evidence.RESULTS)
    for part, shown_by in ((part, one) for shown in own_results.PAGES.values() for part, one in shown.parts.items()):
        assert {row.mixer for row in records[part].rows} - {None} == set(shown_by.mixers), part
        for name in MIXERS:
            assert (f"| [{part}](../own-" in page(name)) is (name in shown_by.mixers)
    small, large = (records[name].status for name in ("own-1b", "own-1b-cuda"))
    assert small != large
    for name in ("gka", "rls", "deltanet"):
        assert f"(../own-least-squares.md#the-ridge-of-the-exact-recursion) | **{small}** | **{large}** |" in page(name)
    assert f"| [own-3](../own-stability.md) | **{records['own-3'].status}** | – |" in page("vla")
    assert mixer_pages.own_table("ttt") == [] and "Results of our own" not in page("ttt")


def test_a_claim_with_a_note_is_marked_wherever_its_outcome_stands() -> None:
    """On docs/leaderboard.md and on the pages of memories, where the note stands below the table."""
    papers = PAGE.read_text().partition("## What the papers claim\n")[2].partition("\n## ")[0]
    noted = {claim.name for claim in claims_of() if claim.note}
    assert {"C12", "C28", "C31"} <= noted and set(re.findall(r"\[(\w+)\]\(claims\.md#\w+\)†", papers)) == noted
    for name in MIXERS:
        table = page(name).partition("Claims of papers about it")[2].partition("\n## ")[0]
        for claim, status in evidence.claims_about(name):
            marked = f"| **{status}**{'†' if claim.note else ''} |"
            assert f"| [{claim.name}](../claims.md#{claim.name.lower()}) {marked}" in table
            assert not claim.note or re.search(rf"^† .*\b{claim.name}\b.*: {re.escape(claim.note)}\.$", table, re.M)


def test_the_page_to_choose_by_is_short_and_its_gain_is_clear() -> None:
    text = choosing.PAGE.path.read_text()
    assert len(text.split()) <= 500 and text.count("\n- **If ") == 5
    gains = choosing.regression_gains(evidence.RESULTS)
    assert gains["linear"].sign == 1 and len(gains) > 25 and gains["linear"].confidence > 0.99
    assert gains["gdn"].tied and gains["deltanet"].tied and "In regression it ties with `deltanet` and `gdn`" in text
    column = [one for one in evidence.full_entries("recall") if one.column == choosing.PAIRS]
    beside = compare_with_reference(column)
    worse = [name for name, one in beside.items() if one.sign < 0]
    assert f"Of {len(beside)} memories, each compared with it alone, {len(worse)} are worse and none better" in text
    assert len(beside) == 10
    assert "gdn" not in worse and "`gdn` 0.66, with which it ties." in text and "images/recall.png" in text
    of_rows, of_texts = choosing.compare_losses(evidence.RESULTS)
    low, high = -of_texts.above.high, -of_texts.above.low
    assert of_rows.above.tied and of_texts.above.sign == -1 and of_texts.tokens == 65536
    assert f"a loss of {of_rows.mean:.2f}, a tie with `linear`, in texts of 65,536 tokens {of_texts.mean:.2f}, " in text
    assert f"{low:.2f} to {high:.2f} lower than `linear` ([3 seeds]" in text
    assert "forgets nothing. In long texts of code it is behind `gdn`." in text
    variance, by_probability = choosing.rank_unknown_keys(evidence.RESULTS)
    assert f"AUROC of {variance:.2f}, where the probability of the answer has {by_probability:.2f};" in text
    assert variance > by_probability
    state = evidence.board("memory")[choosing.STATE]
    assert evidence.layer("softmax").state_size(2048) * 24 * 2 / 1e6 == pytest.approx(state["softmax"].mean, rel=1e-3)
