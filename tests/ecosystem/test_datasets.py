"""Text from folders that the `datasets` library has written."""

import pytest

from fastweights.data.text import TextCorpus

datasets = pytest.importorskip("datasets")
TEXTS = [f"text number {number}" for number in range(40)]


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_save_to_disk(tmp_path, splits):
    """With and without several splits."""
    rows = datasets.Dataset.from_dict({"body": TEXTS})
    other = datasets.Dataset.from_dict({"body": ["other"]})
    saved = datasets.DatasetDict({"train": other, "more": rows}) if splits else rows
    saved.save_to_disk(str(tmp_path / "saved"))
    asked = {"dataset": str(tmp_path / "saved"), "dataset_split": "more", "text_field": "body"}
    assert [document.text for document in TextCorpus(**asked).documents()] == TEXTS
    assert TextCorpus(**asked).fingerprint == TextCorpus(**asked).fingerprint


def test_a_split_that_is_not_there(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"saved.*split 'test'\) cannot be loaded"):
        list(TextCorpus(dataset=str(tmp_path / "saved"), dataset_split="test").documents())
