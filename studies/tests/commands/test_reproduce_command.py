"""`fastweights reproduce`: the list, one claim, a paper, bad commands."""

import json
from dataclasses import replace

import pytest
from fastweights_studies.claims import SOURCES, claim_names

from fastweights.cli import main


def run(capsys, *arguments):
    code = main(["reproduce", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_list_has_every_claim_and_what_was_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(capsys, "C2", "--output", tmp_path)[0] == 0
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        committed = run(capsys, "--list", "--output", tmp_path)[1]
    assert "C5 pdn cpu does not hold does not hold " in " ".join(committed.split())
    monkeypatch.setattr("fastweights_studies.claims.record.COMMITTED", tmp_path)
    code, printed, error = run(capsys, "--list", "--output", tmp_path)
    rows = {line.split()[0]: " ".join(line.split()) for line in printed.splitlines() if line.strip()}
    assert code == 0 and error == "" and set(claim_names()) <= set(rows)
    assert rows["C2"].startswith("C2 pdn cpu holds holds ") and rows["C5"].startswith("C5 pdn cpu does not hold - ")
    assert rows["C31"].startswith("C31 palimpsa cuda no forecast - ") and rows["C29"].startswith(
        "C29 pdn cuda not resolved "
    )
    text = " ".join(printed.split())
    assert "of the results in the output folder, otherwise of those that come with the library." in text
    assert "C1" not in run(capsys, "--list", "--paper", "vla")[1].split()
    title, own = printed.index("Results of our own"), printed.index("own-1")
    assert title < own and printed.index("Claims of the papers") < printed.index("S6") < title
    ours = run(capsys, "--list", "--paper", "own")[1]
    assert "own-3" in ours and "C2" not in ours.split()


def test_the_list_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = run(capsys, "--list")[1]
    assert "…" not in printed and all(len(line) <= 80 for line in printed.splitlines())


def test_a_claim_is_measured_shown_and_written(capsys, tmp_path):
    code, printed, error = run(capsys, "c2", "--output", tmp_path / "new")
    assert code == 0 and error == ""
    for text in ("holds: all elements", "rule", "expected", "query side", str(tmp_path / "new" / "C2.json")):
        assert text in printed.replace("\n", ""), text
    record = json.loads((tmp_path / "new" / "C2.json").read_text())
    about = record["about"]
    assert about["status"] == "holds" and about["command"] == "fastweights reproduce C2"


def test_seeds_are_those_given(capsys, tmp_path):
    assert run(capsys, "C1", "--seeds", "5,6", "--output", tmp_path)[0] == 0
    record = json.loads((tmp_path / "C1.json").read_text())
    assert record["about"]["seeds"] == [5, 6] and [row["seed"] for row in record["rows"]] == [5, 5, 6, 6]


def test_a_paper_leaves_out_what_needs_a_gpu(capsys, tmp_path, monkeypatch):
    from fastweights_studies import claims

    measured, measure = [], claims.run_claim

    def quick(claim, conditions):
        measured.append(claim.name)
        return measure(replace(claim, measure=None, decide=None, needs="nothing in this test"), conditions)

    monkeypatch.setattr(claims, "run_claim", quick)
    code, printed, _ = run(capsys, "--paper", "lattice", "--output", tmp_path)
    assert code == 0 and measured == ["C14", "C15"]
    assert "C33: left out, needs --device cuda" in printed and "C34: left out" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name at least one claim"),
        (("C99",), "did you mean 'C9'"),
        (("--paper", "mamba"), "paper must be one of"),
        (("C1", "--paper", "pdn"), "--paper must be left out"),
        (("C1", "--device", "tpu"), "device must be"),
        (("C1", "--seeds", "x"), "--seeds takes whole numbers"),
        (("C1", "--seeds", "-1"), "--seeds must be a whole number"),
        (("C1", "--seeds", "1,1"), "--seeds must differ"),
        (("C22", "--workers", "1025"), "--workers must be"),
        (("C22", "--workers", "0"), "--workers must be"),
    ],
)
def test_bad_commands_end_with_one_line(capsys, tmp_path, arguments, message):
    code, printed, error = run(capsys, *arguments, "--output", tmp_path / "new")
    assert code == 2 and message in error and error.count("\n") == 1 and printed == ""
    assert not (tmp_path / "new").exists()


def test_a_result_of_the_format_before_is_refused_and_can_be_replaced(capsys, tmp_path):
    before = {"claim": "C2", "declaration": {}, "status": "holds", "numbers": {"a number": [1.0]}}
    (tmp_path / "C2.json").write_text(json.dumps(before))
    code, _, error = run(capsys, "--list", "--output", tmp_path)
    assert code == 2 and error.count("\n") == 1 and "C2.json has the format of before; measure the claim again" in error
    assert run(capsys, "C2", "--output", tmp_path, "--overwrite")[0] == 0
    assert run(capsys, "--list", "--output", tmp_path)[0] == 0


def test_an_output_that_is_a_file_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("precious")
    code, _, error = run(capsys, "C2", "--output", tmp_path / "file")
    assert code == 2 and "--output" in error and (tmp_path / "file").read_text() == "precious"


def test_trainings_that_fail_end_with_one_line(capsys, tmp_path, monkeypatch):
    from fastweights_studies import claims

    from fastweights.training import WorkerError

    def fails(claim, conditions):
        raise WorkerError("run x failed: no memory", "traceback\n")

    monkeypatch.setattr(claims, "run_claim", fails)
    code, _, error = run(capsys, "C2", "--output", tmp_path)
    assert code == 1 and error.startswith("traceback\n")
    assert "C2: run x failed: no memory; the same command continues where trainings stopped" in error


def test_help_names_the_papers():
    from fastweights_studies.commands.reproduce import PAPERS

    assert ", ".join(SOURCES) == PAPERS
