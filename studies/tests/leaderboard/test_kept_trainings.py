"""Trainings of a board that is not whole yet, kept as an archive: the board goes on from them."""

import tarfile

import pytest
import torch
from fastweights_studies.leaderboard import PARTS, SIZES
from fastweights_studies.leaderboard.trainings import match_mixer
from fastweights_studies.places import RESULTS
from fastweights_studies.rate_search import _find_ended

from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.training import RecallExperiment

ARCHIVE = RESULTS / "trained" / "recall-full.tar.xz"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "recall-full"


@pytest.mark.parametrize("heads", [16, 32])
def test_the_grids_of_the_first_seed_count(heads, trained, monkeypatch):
    """As long as the declared size of the board is that of these trainings."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # to name the device that they ran on
    size, part = SIZES["full"].task("recall"), PARTS["recall"]
    (column,) = (one for one in size.columns if one["task"] == "mqar-shuffled" and one["head_dim"] == heads)
    folder = trained / file_name(part.name_column(column))
    assert {one.name for one in folder.iterdir()} == set(size.main) - {"gka", "mesa"}  # theirs had a fault
    for name in sorted(one.name for one in folder.iterdir()):
        mixer = match_mixer(size, column, MixerChoice(name))
        experiment = RecallExperiment(
            **size.experiment(column), mixers=(mixer.choice,), intermediate_size=mixer.intermediate_size,
            learning_rates=size.rates, seeds=size.seeds[:1], device="cuda",
        )  # fmt: skip
        assert len(_find_ended(experiment, folder / name / "seed0")) == len(size.rates), name
