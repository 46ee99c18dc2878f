"""docs/claims.md is what its generator makes of the results, and the results are of the claims as they are declared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fastweights_studies.claims import Conditions, claims_of, find_claim, load_records, run_claim, save_record
from fastweights_studies.claims.measurement import UNDERTRAINED
from fastweights_studies.claims.tables import number_lines
from fastweights_studies.pages import claims

RECORDS = load_records(claims.RESULTS)


def test_the_page_is_generated() -> None:
    command = "python -m fastweights_studies.pages.claims"
    assert claims.PAGE.read_text() == claims.render(), f"run {command}"
    assert command in claims.PAGE.read_text()


@pytest.mark.parametrize("name", RECORDS)
def test_a_result_is_of_the_declared_claim(name: str) -> None:
    """Expectation, setting and rule cannot change behind a result, and its verdict is that of the rule."""
    record = RECORDS[name]
    claim, device = find_claim(record.claim), record.device
    assert name == claim.result_name(device)
    assert record.declaration == claim.declaration(device), (
        f"run fastweights reproduce {name} --output {claims.RESULTS.name}"
    )
    if record.rows:
        assert claim.decide is not None
        verdict = claim.verdict(record.measurement)
        assert (verdict.status, list(verdict.statements)) == (record.status, record.statements)


def test_the_page_of_other_results(tmp_path: Path) -> None:
    page = claims.render(tmp_path)
    assert "0 of 41 claims have a measured status" in page and "fastweights reproduce C22 --device cuda" in page
    save_record(tmp_path, run_claim(find_claim("C2"), Conditions(seeds=(0,))))
    page = claims.render(tmp_path)
    assert (
        "1 of 41 claims have a measured status; 1 of the 1 with an expectation from before came out as expected" in page
    )
    assert "## Holds: 1\n" in page and f"## Not resolved: {len(claims_of()) - 1}" in page


def test_fewer_seeds_and_trainings_that_still_learnt_are_said_beside_the_number() -> None:
    claim, record = dataclasses.replace(find_claim("C27"), note=""), RECORDS["C27"]
    trained = [row for row in record.rows if row.measure != UNDERTRAINED]
    assert len(trained) < len(record.rows)
    for seeds, rows, said in (
        ([42], trained, " (**1 of 3 seeds**)"),
        ([42], record.rows, " (**1 of 3 seeds; some trainings were still learning**)"),
        ([42, 123, 999], trained, ""),
    ):
        changed = {"C27": dataclasses.replace(record, seeds=seeds, rows=rows)}
        assert claims.caution(claim, changed) == said
        line = next(line for line in claims.overview(changed).splitlines() if line.startswith("| [C27]"))
        assert line.endswith(f"{said[:-3]}; †**) |" if said else " (**†**) |")  # the claim has a note, below the table
        assert f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; " in claims.section(claim, changed)


def test_numbers_that_were_seen_before_count_as_no_forecast(tmp_path: Path) -> None:
    seen = [claim for claim in claims_of() if claim.seen]
    assert [claim.name for claim in seen] == [
        "C12",
        "S1",
        "S5",
    ] and "Numbers of C12, S1 and S5 had been" in claims.render()
    save_record(tmp_path, RECORDS["S1"])
    assert "1 of 41 claims have a measured status; 0 of the 0 with an expectation from before" in claims.render(
        tmp_path
    )
    for claim in seen:
        section = claims.section(claim, RECORDS)
        assert f"(no forecast of this outcome: {claim.seen})" in section and f"(**{claim.seen}" in section


def test_a_claim_without_a_forecast_has_no_expectation() -> None:
    """It is named in the introduction and not counted: 25 are measured, C12 and S1 had been seen, C27 has no forecast."""
    without = [claim for claim in claims_of() if claim.forecast.startswith("none") and claim.expected == "not resolved"]
    assert [claim.name for claim in without] == ["C24", "C25", "C27", "C30", "C31", "C34", "C35"]
    assert find_claim("C11").has_forecast  # its status was expected, numbers were not
    page, forecast = claims.render(), [claim for claim in claims_of() if claim not in without and not claim.seen]
    measured = [claim for claim in forecast if RECORDS[claim.name].status in claims.MEASURED]
    met = sum(RECORDS[claim.name].status == claim.expected for claim in measured)
    assert len(measured) == 25 - 2 - 1
    risky = [claim for claim in measured if not claim.safe]
    met_risky = sum(RECORDS[claim.name].status == claim.expected for claim in risky)
    assert f"expected, {met_risky} of {len(risky)} without those that risked nothing" in page
    kept = [claim.name for claim in risky if not claim.changed_after_run]
    assert kept == ["C5", "C9"] and find_claim("S2").changed_after_run and find_claim("C23").changed_after_run
    assert f"Of these {len(risky)}, C5 and C9 kept setting and rule of before the run, and 2 of 2 came out" in page
    assert {claim.name for claim in claims_of() if claim.safe} >= {"C1", "C3", "C21"}
    assert f"{met} of the {len(measured)} with an expectation from before came out as expected" in page
    assert "For C24, C25, C27, C30, C31, C34 and C35 no outcome was forecast." in page
    for claim in without:
        reason = claim.forecast.removeprefix("none")
        assert f"\n- Expected: no forecast{reason}\n" in claims.section(claim, RECORDS)


def test_what_does_not_hold_comes_first() -> None:
    page = claims.render()
    titles = [page.index(f"\n## {title}: ") for title in ("Does not hold", "Holds weakly", "Holds", "Not resolved")]
    assert titles == sorted(titles)


def test_long_reasons_are_shown_in_parts_and_learning_rates_beside_their_numbers() -> None:
    claim, record = find_claim("C22"), RECORDS["C22"]
    text = claims.section(claim, RECORDS)
    assert len(record.statements) == 3 and all(f"\n    - {part}\n" in text for part in record.statements)
    short = {"C22": dataclasses.replace(record, statements=["one (a; b)", "two"])}
    assert claims.list_reasons(claim, short) == ["one (a; b); two"]
    assert "\n| learning rate of" not in text and "| mean | smallest | largest | learning rate |" in text
    lines = number_lines(claim, record.measurement)
    assert lines and all(f"| {line.name} | {line.mean} |" in text for line in lines)
    assert all(line.rate for line in lines if not line.name.startswith("diverged"))
    assert "| number | value |\n" in claims.section(find_claim("S3"), RECORDS)
