"""Folders of interrupted trainings that the version before the common engine has written are continued to the same numbers.

earlier_folders.tar.xz holds a recall experiment with one run that has ended and one that was stopped after 6 of 12 steps, a
language model that was stopped after 4 of 6 steps, in one process (train) and in two with FSDP2 (sharded), and the losses of the
same trainings without a stop.
"""

import dataclasses
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights.environment import versions
from fastweights.training import run_recall
from fastweights.training.language import train_language

from .language.small import small_run, write_texts
from .small import small_experiment


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """The current folder, with what the archive holds."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open(Path(__file__).with_name("earlier_folders.tar.xz")) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def change(file, **values):
    """Set values of a JSON file that depend on the versions of libraries."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def close_to(numbers):
    return pytest.approx(numbers, rel=1e-4)  # another torch rounds otherwise


@pytest.mark.slow
def test_a_recall_experiment_continues(earlier):
    change(earlier / "recall" / "experiment.json", torch=versions()["torch"], fastweights=versions()["fastweights"])
    small = {
        "width": 4,
        "heads": 1,
        "vocab_size": 8,
        "pairs": (1,),
        "intermediate_size": 0,
        "tie_word_embeddings": True,
    }
    experiment = small_experiment(mixers=("linear",), seeds=(0, 1), **small)
    ended = json.loads(next(earlier.glob("recall/runs/*-seed0.json")).read_text())
    first, second = run_recall(experiment, "recall", workers=1)
    assert dataclasses.asdict(first) == {**ended, "validated": {}, "tested": {}}
    whole = json.loads((earlier / "recall-expected.json").read_text())
    assert second.losses == close_to(whole["losses"]) and second.accuracies == close_to(whole["accuracies"])
    assert second.losses[:6] == whole["losses"][:6]  # from the checkpoint
    assert not list(earlier.rglob("*.checkpoint"))


@pytest.fixture
def language(earlier):
    """The run of the language model, by the folder that it was stopped in."""
    write_texts(earlier / "texts", files=12)

    def make(output):
        run = small_run(
            earlier,
            output=output,
            cache="cache",
            corpus=TextCorpus(paths=("texts",), held_out_fraction=0.2),
            tokenizer=TextTokenizer(vocab_size=262),
            model={
                "hidden_size": 4,
                "num_hidden_layers": 1,
                "num_heads": 1,
                "mixer": "linear",
                "intermediate_size": 0,
                "tie_word_embeddings": True,
            },
            context_lengths=(16,),
            max_steps=6,
            checkpoint_every=100,
        )
        change(earlier / output / "run.json", **prepare_text(run.corpus, run.tokenizer, run.cache).fingerprints)
        return run

    return make


@pytest.mark.parametrize("output", ["train", "sharded"])
def test_a_language_model_continues(earlier, language, output):
    (result,) = train_language(language(output))
    whole = json.loads((earlier / "train-expected.json").read_text())
    assert result.losses == close_to(whole["losses"]) and result.held_out_losses == close_to(whole["held_out_losses"])
    before = [json.loads(line) for line in (earlier / output / "log.jsonl").read_text().splitlines()]
    assert result.losses[:4] == [point["loss"] for point in before if "loss" in point][:4]


def test_a_damaged_checkpoint_without_checksums(earlier, language):
    """What can be seen without them is refused, before or while it is loaded."""
    run, checkpoint = language("train"), earlier / "train/checkpoints/checkpoint-4"
    (checkpoint / "checksums.json").unlink()
    whole = Path(shutil.copytree(checkpoint, earlier / "whole"))
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        for content in (None, (whole / name).read_bytes()[:50], b"[]"):
            (checkpoint / name).unlink()
            if content is not None:
                (checkpoint / name).write_bytes(content)
            with pytest.raises(ValueError, match="(?s)checkpoint-4 is damaged .*(delete it|put a copy in its place)"):
                train_language(run)
            shutil.copy(whole / name, checkpoint / name)
    assert len(train_language(run)[0].losses) == 6
