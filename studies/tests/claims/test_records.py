"""Records: files, numbers that are not finite, verdicts without a measurement."""

import dataclasses
import json
import math

import pytest
from fastweights_studies.claims import (
    Conditions,
    Measurement,
    Quantity,
    Verdict,
    find_claim,
    load_record,
    load_records,
    run_claim,
    save_record,
)
from fastweights_studies.claims.tables import claims_table

from fastweights.results import ResultsError

from .made import make_numbers


def test_a_record_survives_its_file(tmp_path):
    record = run_claim(find_claim("C2"), Conditions(seeds=(0,)))
    path = save_record(tmp_path / "new", record)
    assert load_record(path) == record and load_records(tmp_path / "new") == {"C2": record}
    assert record.command == "fastweights reproduce C2" and record.declaration["rule"] == find_claim("C2").rule
    assert record.origin.versions["torch"] and record.origin.device and record.seconds > 0
    assert {row.task for row in record.rows} == {"C2"} and all(row.origin == record.origin for row in record.rows)
    assert load_records(tmp_path / "missing") == {}


def test_the_larger_size_of_a_gpu_has_a_file_of_its_own(tmp_path):
    """Claims of one size keep one file, wherever they are measured."""
    small = dataclasses.replace(run_claim(find_claim("C2"), Conditions(seeds=(0,))), claim="own-1")
    large = dataclasses.replace(small, device="cuda:0", status="does not hold")
    saved = [save_record(tmp_path, record).name for record in (small, large, dataclasses.replace(large, claim="own-3"))]
    assert saved == ["own-1.json", "own-1-cuda.json", "own-3.json"]
    records = load_records(tmp_path)
    assert records["own-1"] == small and records["own-1-cuda"] == large
    claim = find_claim("own-1")
    assert set(claim.declaration("cuda")) - set(claim.declaration("cpu")) == {"larger"}
    assert find_claim("own-3").declaration("cuda") == find_claim("own-3").declaration("cpu")
    table = claims_table([claim], records)
    assert list(map(str, table.columns[4].cells)) == ["holds, on a GPU does not hold"]


def test_numbers_that_are_not_finite_are_kept_as_such(tmp_path):
    claim = dataclasses.replace(
        find_claim("C2"),
        measure=lambda conditions: Measurement(tuple(make_numbers("x", [math.inf, 1.0]))),
        decide=lambda found: Verdict("holds" if found.largest("x") < 2 else "does not hold", "x"),
        numbers={"x": Quantity("x")},
    )
    record = load_record(save_record(tmp_path, run_claim(claim, Conditions(seeds=(0, 1)))))
    assert [row.value for row in record.rows] == [None, 1.0] and record.status == "does not hold"
    assert math.isnan(record.measurement.largest("x")) and math.isnan(record.measurement.smallest("x"))
    assert record.command.endswith("--seeds 0,1")


def test_what_has_no_measurement_is_not_resolved():
    claim = dataclasses.replace(find_claim("C2"), measure=None, decide=None, needs="a larger machine")
    record = run_claim(claim, Conditions(seeds=(0,)))
    assert record.status == "not resolved" and record.reason == "needs a larger machine" and not record.rows


def test_damaged_files_are_refused(tmp_path):
    path = save_record(tmp_path, run_claim(find_claim("C2"), Conditions(seeds=(0,))))
    content = json.loads(path.read_text())
    about = content["about"]
    for damaged, message in (
        ("{", "damaged"),
        (json.dumps({**content, "about": {**about, "more": 1}}), "other fields"),
        (json.dumps({**content, "about": [1]}), "about must be an object"),
        (json.dumps({**content, "about": {**about, "status": "true"}}), "unknown status"),
        (json.dumps({**content, "format": 3}), "not of format 2"),
        (json.dumps({**about, "numbers": {"x": [1.0]}}), "format of before; measure the claim again, with --overwrite"),
    ):
        path.write_text(damaged)
        with pytest.raises(ResultsError, match=message):
            load_record(path)
