"""What a study deletes of the trainings that it has made."""

import pytest
from fastweights_studies.trained_folders import remove_trainings

from fastweights.training import RecallExperiment
from fastweights.training.language.folder import LanguageFolder
from fastweights.training.recall.folder import ExperimentFolder


def test_trainings_below_a_folder_are_deleted_and_nothing_else(tmp_path):
    recall, language = tmp_path / "a" / "recall", tmp_path / "a" / "language"
    with ExperimentFolder(recall).opened(RecallExperiment(), overwrite=False):
        (recall / "results.json").write_text("{}")
    language.mkdir()
    (language / "run.json").write_text('{"model": 1, "tokenizer": 1, "length": 1, "max_steps": 1}')
    (language / "log.jsonl").write_text("")
    for place in (tmp_path, recall):
        (place / "notes.txt").write_text("mine")
    remove_trainings(tmp_path / "a")
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {"a/recall/.lock", "a/language/.lock"} == {
        "notes.txt",
        "a/recall/notes.txt",
        "a/recall/experiment.json",
    }
    with ExperimentFolder(recall).opened(RecallExperiment(seeds=(1,)), overwrite=False):  # it may be used again
        pass
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="must not lead through a link"):
        remove_trainings(tmp_path / "link")
    assert LanguageFolder(language).path.is_dir()
