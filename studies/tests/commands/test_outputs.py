"""Nothing of a user's is replaced: what the commands of the studies do with what stands where they write."""

from __future__ import annotations

import json

import pytest

from fastweights.cli import main
from tests.cli import writing
from tests.cli.writing import SMALL, refused, run_twice, writing_tests

whole, place = writing.whole, writing.place  # fixtures

# Commands by name: without the place of --output, and where the work begins.
COMMANDS = {
    "inspect": (
        "inspect model --tokens 20 --measures norms --text text.txt", "fastweights.models.loading:load_language_model",
    ),
    "reproduce": ("reproduce C2", "fastweights_studies.claims:run_claim"),
    "leaderboard": ("leaderboard rules --mixers gdn", "fastweights_studies.leaderboard:run_part"),
}  # fmt: skip
RECALL = f"recall {SMALL} --learning-rates 0.01 --test-examples 2"

TestWriting = writing_tests(
    COMMANDS,
    [("reproduce", "new", "new/C2.json"), ("leaderboard", "new", "new/rules-cpu.json")],
    beside=["reproduce", "leaderboard"],  # one file per claim or part
)


@pytest.mark.slow
def test_what_an_inspection_wrote_before_it_kept_lists_of_files_is_replaced(place):
    (place / "seen").mkdir()
    (place / ".seen.0badcafe.partial").mkdir()
    line = f"{COMMANDS['inspect'][0]} --output seen"
    run_twice(line)
    assert not (place / ".seen.0badcafe.partial").exists()
    described = json.loads((place / "seen" / "inspection.json").read_text())
    described.pop("files")
    (place / "seen" / "inspection.json").write_text(json.dumps(described))
    (place / "seen" / "notes.txt").write_text("mine")
    assert main(line.split()) == 0
    assert (place / "seen" / "notes.txt").read_text() == "mine"


def test_what_an_inspection_wrote_is_replaced(place):
    line = f"{COMMANDS['inspect'][0]} --output seen"
    assert main(line.split()) == 0
    before = (place / "seen" / "inspection.json").stat()
    (place / "seen" / "notes.txt").write_text("mine")
    assert main(line.split()) == 0
    assert (place / "seen" / "inspection.json").stat().st_mtime_ns > before.st_mtime_ns
    assert (place / "seen" / "notes.txt").read_text() == "mine"


def test_files_of_an_inspection_that_were_edited_stay(place, capsys):
    line = f"{COMMANDS['inspect'][0]} --output seen"
    assert main(line.split()) == 0
    with (place / "seen" / "index.html").open("a") as page:
        page.write("<p>what I think of it</p>")
    refused(place, capsys, line, "index.html")
    refused(place, capsys, f"{line} --overwrite", "index.html")


def test_a_list_of_files_deletes_nothing_else(place):
    """inspection.json may be a stranger's."""
    (place / "seen").mkdir()
    (place / "seen" / "notes.txt").write_text("mine")
    described = {"layers": {}, "panels": {}, "files": {"*": "", "../mine/file": "", "notes": ""}}
    (place / "seen" / "inspection.json").write_text(json.dumps(described))
    assert main(f"{COMMANDS['inspect'][0]} --output seen --overwrite".split()) == 0
    assert (place / "seen" / "notes.txt").read_text() == "mine" and (place / "mine" / "file").exists()


def test_records_are_replaced_by_those_of_the_same_claim_alone(place, capsys):
    line = f"{COMMANDS['reproduce'][0]} --output new"
    run_twice(line)
    record = json.loads((place / "new" / "C2.json").read_text())
    other = {**record, "about": {**record["about"], "claim": "C3"}}
    (place / "new" / "C2.json").write_text(json.dumps(other))
    refused(place, capsys, line, "C2.json")


@pytest.mark.slow
def test_a_training_that_is_measured_anew_leaves_other_files(place):
    """reproduce and leaderboard delete the trainings that they made, with --overwrite."""
    from fastweights_studies.trained_folders import remove_trainings

    recall = f"{RECALL} --workers 1 --output new/trained/C2/all"
    assert main(recall.split()) == 0
    (place / "new" / "trained" / "C2" / "notes.txt").write_text("mine")
    runs = place / "new" / "trained" / "C2" / "all" / "runs"
    (runs / "notes.json").write_text("mine")
    assert main(f"{COMMANDS['reproduce'][0]} --output new --overwrite".split()) == 0
    left = {path.name for path in (place / "new" / "trained").rglob("*") if path.is_file()}
    assert left == {"notes.txt", "notes.json", "experiment.json", ".lock"}  # the folder may be used again
    assert main(recall.replace("--steps 2", "--steps 3").split()) == 0
    remove_trainings(place / "nowhere")
