"""An output folder is used only when every check passes; otherwise nothing in it changes."""

import dataclasses
import json
from pathlib import Path

import filelock
import pytest

from fastweights.environment import versions
from fastweights.training.checkpoints import save_checkpoint
from fastweights.training.recall.folder import ExperimentFolder

from ..results.made_up import made_up
from .small import small_experiment


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def enter(path, experiment, overwrite=False):
    folder = ExperimentFolder(path)
    with folder.opened(experiment, overwrite=overwrite):
        pass
    return folder


def refused(path, experiment, message):
    """The folder is refused with this message, and stays as it was."""
    before = content(path)
    with pytest.raises(ValueError, match=message):
        enter(path, experiment)
    assert content(path) == before


@pytest.fixture
def used(tmp_path):
    """A folder of `small_experiment()` with a result, a checkpoint and plots in place of real ones."""
    folder = enter(tmp_path / "deep" / "output", small_experiment())
    folder.results.write_text("{}")
    (folder.path / "loss-curves.png").write_bytes(b"png")
    return folder


def test_a_new_folder_is_made_and_taken_up_again(tmp_path):
    path = tmp_path / "a" / "b"
    enter(path, small_experiment())
    enter(path, small_experiment())
    assert json.loads((path / "experiment.json").read_text())["steps"] == 12


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    refused(tmp_path, small_experiment(), "holds 'thesis.tex' and no experiment.json")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        enter(tmp_path, small_experiment(), overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    file = tmp_path / "output"
    file.write_text("precious")
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match="output must be a folder"):
            enter(path, small_experiment())
    assert file.read_text() == "precious"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that root cannot write to either")
def test_a_folder_that_cannot_be_written_to_is_refused():
    with pytest.raises(ValueError, match="can be written to"):
        enter(Path("/proc/fastweights"), small_experiment())


def test_another_experiment_is_refused_and_every_difference_named(used):
    other = small_experiment(steps=13, mixers=("gdn",))
    refused(used.path, other, r'mixers is \["linear"\] there and \["gdn"\] here')
    refused(used.path, other, "steps is 12 there and 13 here")


def test_a_folder_from_before_task_options_is_continued(tmp_path):
    """The files as they were written before experiments had task_options, name by name."""
    shared = {
        **{"task": "mqar-shuffled", "length": None, "vocab_size": 16, "width": 8, "heads": 2, "layers": 1, "steps": 12},
        **{"batch_size": 4, "weight_decay": 0.1, "warmup_fraction": 0.1, "final_fraction": 0.1},
        **{"max_gradient_norm": 1.0, "test_examples": 8, "evaluations": 2, "device": "cpu"},
    }
    grid = {"mixers": ["linear"], "pairs": [2], "learning_rates": [0.01], "seeds": [0]}
    (tmp_path / "runs").mkdir()
    (tmp_path / "experiment.json").write_text(
        json.dumps({**shared, **grid, "fastweights": versions()["fastweights"], "torch": versions()["torch"]})
    )
    result = made_up()
    run = {**shared, "mixer": "linear", "pairs": 2, "learning_rate": 0.01, "seed": 0}
    (tmp_path / "runs" / "linear-pairs2-lr0.01-seed0.json").write_text(
        json.dumps({**dataclasses.asdict(result), "run": run})
    )
    old = {"initializer_range": 0.02}  # the default then
    enter(tmp_path, small_experiment(**old))
    other = small_experiment(task_options={"query_order": "ordered"}, **old)
    refused(tmp_path, other, "task_options is not set there")
    refused(tmp_path, small_experiment(), "initializer_range is not set there and 0.05 here")


def test_another_version_is_refused(used, monkeypatch):
    monkeypatch.setattr("fastweights.training.recall.folder.versions", lambda: {"fastweights": "99", "torch": "0"})
    refused(used.path, small_experiment(), 'fastweights is ".*" there and "99" here')


def test_overwrite_deletes_the_other_experiment_and_nothing_else(used):
    (used.path / "notes.txt").write_text("mine")
    run = small_experiment().runs()[0]
    used.result(run).write_text("{}")
    used.checkpoint(run).write_text("garbage")
    enter(used.path, small_experiment(steps=13), overwrite=True)
    left = {path.relative_to(used.path).as_posix() for path in content(used.path)}
    assert left == {"experiment.json", "notes.txt"}
    assert json.loads((used.path / "experiment.json").read_text())["steps"] == 13


def test_an_experiment_is_deleted_and_nothing_else(used):
    (used.path / "notes.txt").write_text("mine")
    used.remove()
    left = {path.relative_to(used.path).as_posix() for path in content(used.path)}
    assert left == {"notes.txt", "experiment.json"}
    enter(used.path, small_experiment(steps=13))  # the folder may be used again


def test_a_folder_in_use_is_refused(used):
    with filelock.FileLock(used.path / ".lock"):
        refused(used.path, small_experiment(), "in use by another process")


def test_damaged_checkpoints_stay_until_every_file_is_checked(used):
    experiment = small_experiment(seeds=(0, 1))
    first, second = experiment.runs()
    lines = []
    with ExperimentFolder(used.path).opened(experiment, overwrite=True):
        used.checkpoint(first).write_bytes(b"garbage")
        used.result(second).write_text("{")
    refused(used.path, experiment, f"{second.name}.json is damaged")
    used.result(second).unlink()
    with ExperimentFolder(used.path).opened(experiment, overwrite=False, report=lines.append):
        assert not used.checkpoint(first).exists()
    assert lines == [f"{first.title}: its checkpoint {used.checkpoint(first)} is damaged, so this run begins again"]


def test_damaged_files_are_refused_and_named(used):
    run = small_experiment().runs()[0]
    save_checkpoint(used.checkpoint(run), run={"mixer": "other"}, state={})
    refused(used.path, small_experiment(), f"{run.name}.checkpoint belongs to another run")
    used.result(run).write_text('{"accuracy": 0.')
    refused(used.path, small_experiment(), f"{run.name}.json is damaged")
    used.result(run).write_text('{"accuracy": 0.5}')
    refused(used.path, small_experiment(), f"{run.name}.json has other fields")
    (used.path / "experiment.json").write_text("{")
    refused(used.path, small_experiment(), "experiment.json is damaged")


def test_what_a_killed_writer_left_is_removed(used):
    left = used.path / "runs" / ".linear.json.0badcafe.partial"
    left.write_text("half")
    enter(used.path, small_experiment())
    assert not left.exists()


def test_more_steps_are_another_experiment_whose_schedule_is_named(tmp_path):
    folder, experiment = ExperimentFolder(tmp_path), small_experiment()
    with folder.opened(experiment, overwrite=False):
        pass
    for steps, named in ((24, True), (6, False)):
        other = small_experiment(steps=steps)
        with pytest.raises(ValueError, match=f"steps is 12 there and {steps} here") as refused:
            folder.check(other, overwrite=False)
        assert ("starts from the beginning" in str(refused.value)) == named
    folder.check(experiment, overwrite=False)
