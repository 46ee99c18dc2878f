"""Every part from end to end at toy size: its trainer, its board, resuming, new mixers, failures."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from fastweights_studies import rate_search
from fastweights_studies.leaderboard import (
    PARTS,
    SIZES,
    Request,
    find_part,
    known_parts,
    load_board,
    run_part,
    table_of,
)
from fastweights_studies.leaderboard.language import match_models, plan_run
from fastweights_studies.leaderboard.sizes import LanguageSize
from fastweights_studies.record import read_rows, select, write_rows

from fastweights import data
from fastweights.data import register_task
from fastweights.data.text import TextCorpus
from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.training import WorkerError
from fastweights.training.recall import run as recall
from fastweights.training.recall.run import run_recall_parts

from .toy import NOWHERE, S3, TOY, read_entries, task, train_here

MIXERS = ("linear", "softmax")
SMALL = SIZES["small"]


WORDS = ("a", "memory", "of", "keys", "and", "values", "that", "model", "reads", "writes", "while", "it", "its", "text")


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    corpus = TextCorpus(paths=[str(tmp_path / "text.txt")], held_out=[str(tmp_path / "held-out.txt")])
    for number, name in enumerate(("text.txt", "held-out.txt")):
        text = " ".join(WORDS[(place * place + number) % len(WORDS)] for place in range(2000))
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(LanguageSize, "text", lambda size: corpus)
    monkeypatch.setitem(SIZES, "small", TOY)


@pytest.fixture
def here(monkeypatch):
    """The runs that were trained, in this process."""
    return train_here(monkeypatch)


def request(folder, *mixers, **more):
    choices = tuple(map(MixerChoice, mixers or MIXERS))
    return Request(**{"mixers": choices, "size": "small", "device": "cpu", "output": folder, "workers": 1, **more})


COLUMNS = {
    "mqar": ["shuffled, 2 pairs, heads of 4", "ordered, 2 pairs, heads of 4"],
    "regression": ["2 inputs, 3 examples, noise 0.1"],
    "tracking": [S3],
}


def trainings(entry):
    """How many trainings an entry is from, those at other rates too."""
    return sum({row.seed: row.run["trainings"] for row in entry.rows}.values())


@pytest.mark.parametrize("part", ["mqar", "regression", "tracking"])
def test_a_part_trains_every_mixer_and_is_kept(part, tmp_path, here):
    path = run_part(PARTS[part], request(tmp_path))
    found = read_entries(part, tmp_path)
    columns = COLUMNS[part]
    assert set(found) == {(column, mixer) for column in columns for mixer in MIXERS}
    for (column, mixer), row in found.items():
        assert len(row.values) == 2 and trainings(row) == 3
        folder = tmp_path / f"trained/{part}-small" / file_name(column) / mixer
        grid = sorted(folder.glob("seed0/runs/*.json"))
        best = sorted((json.loads(file.read_bytes()) for file in grid), key=lambda run: run["run"]["learning_rate"])
        used = [run for run in best if run["run"]["learning_rate"] == row.learning_rate]
        later = [json.loads(file.read_bytes()) for file in folder.glob("seed1/runs/*.json")]
        assert row.undertrained == any(run["undertrained"] for run in (*used, *later))
        assert part == "regression" or row.undertrained  # three steps are too short to tell
        sign = -1 if part == "regression" else 1
        assert row.values[0] == max(sign * (run["error"] if sign < 0 else run["accuracy"]) for run in best) * sign
        assert {run["run"]["learning_rate"] for run in best} == set(TOY.tasks[part].rates)
        assert {run.learning_rate for run in here if (run.seed, run.choice.label) == (1, mixer)} >= {row.learning_rate}
        assert len(row.of("exact_error")) == (2 if part == "regression" else 0)
    declared = [column.parameters for column in PARTS[part].setting("small")]
    assert {str(row.column) for row in load_board(path).rows} == set(map(str, declared))
    here.clear()
    before = path.read_bytes()
    run_part(PARTS[part], request(tmp_path))
    assert here == [] and path.read_bytes() == before
    _, lines = table_of(PARTS[part], "small", load_board(path).rows, [*MIXERS, "rls"])
    assert lines[-1][-1] == "not run"
    assert all("*" in line[-1] for line in lines if line[0] in MIXERS) or part == "regression"


def test_the_other_seeds_take_the_best_rate_alone(tmp_path, here):
    run_part(PARTS["tracking"], request(tmp_path, "linear", seeds=(3, 4, 5)))
    rates = {seed: [run.learning_rate for run in here if run.seed == seed] for seed in (3, 4, 5)}
    best = read_entries("tracking", tmp_path)[S3, "linear"].learning_rate
    assert sorted(rates[3]) == [1e-3, 1e-2] and rates[4] == rates[5] == [best]


def measure_on(monkeypatch, module):
    """The machine that a module of the leaderboard measures on, under "machine"."""
    machine = {"machine": "the first"}
    monkeypatch.setattr(
        f"fastweights_studies.leaderboard.{module}.find_origin",
        lambda device: replace(NOWHERE, device=machine["machine"]),
    )
    return machine


def machines(entry):
    return [origin.device for origin in entry.origins]


def test_rows_name_where_each_of_their_seeds_was_measured(tmp_path, here, monkeypatch):
    machine = measure_on(monkeypatch, "trainings")

    def measured(*seeds):
        run_part(PARTS["tracking"], request(tmp_path, "linear", seeds=seeds))
        return machines(read_entries("tracking", tmp_path)[S3, "linear"])

    assert measured(3) == ["the first"]
    machine["machine"] = "the second"
    assert measured(3) == ["the first"]
    assert measured(3, 4) == ["the first", "the second"]
    shutil.rmtree(tmp_path / "trained")
    here.clear()
    assert measured(3, 4) == ["the first", "the second"] and here == []  # the board has these seeds
    machine["machine"] = "the third"
    assert measured(4, 3) == ["the third"]  # another first seed


def test_a_new_mixer_joins_what_is_there(tmp_path, here):
    run_part(PARTS["tracking"], request(tmp_path, "linear"))
    first = read_entries("tracking", tmp_path)[S3, "linear"]
    here.clear()
    run_part(PARTS["tracking"], request(tmp_path, "gdn"))
    assert {run.choice.name for run in here} == {"gdn"}
    found = read_entries("tracking", tmp_path)
    assert set(found) == {(S3, "linear"), (S3, "gdn")} and found[S3, "linear"] == first


def test_an_interrupted_part_continues(tmp_path, here, monkeypatch):
    train = rate_search.run_recall_parts

    def interrupted(experiments, outputs, **options):
        half = dict(list(experiments.items())[:1])
        train(half, {name: outputs[name] for name in half}, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(rate_search, "run_recall_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_part(PARTS["tracking"], request(tmp_path))
    kept = len(here)
    monkeypatch.setattr(rate_search, "run_recall_parts", train)
    run_part(PARTS["tracking"], request(tmp_path))
    assert kept == 2 and len(here) == 2 * 3  # none twice
    assert set(read_entries("tracking", tmp_path)) == {(S3, mixer) for mixer in MIXERS}


def test_an_interrupted_part_has_the_rows_that_have_ended(tmp_path, here, monkeypatch):
    train = recall.train_jobs

    def interrupted(jobs, *others):
        train([job for job in jobs if job.run.choice.name == "linear"], *others)
        raise KeyboardInterrupt

    monkeypatch.setattr(recall, "train_jobs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_part(PARTS["tracking"], request(tmp_path, seeds=(0,)))
    assert set(read_entries("tracking", tmp_path)) == {(S3, "linear")}
    with pytest.raises(KeyboardInterrupt):
        run_part(PARTS["tracking"], request(tmp_path / "seeds", seeds=(0, 1)))
    assert {run.seed for run in here} == {0} and read_entries("tracking", tmp_path / "seeds") == {}


def test_mixers_whose_runs_end_are_kept_where_others_fail(tmp_path, here, monkeypatch):
    train = rate_search.run_recall_parts

    def failing(experiments, outputs, **options):
        good = {name: one for name, one in experiments.items() if "softmax" not in name}
        train(good, {name: outputs[name] for name in good}, **options)
        if len(good) < len(experiments):
            raise WorkerError("a worker died")
        return {}

    monkeypatch.setattr(rate_search, "run_recall_parts", lambda *a, **k: failing(*a, **k) or train(*a, **k))
    with pytest.raises(WorkerError):
        run_part(PARTS["tracking"], request(tmp_path))
    assert set(read_entries("tracking", tmp_path)) == {(S3, "linear")}


def test_another_setting_is_refused(tmp_path, here, monkeypatch):
    run_part(PARTS["tracking"], request(tmp_path, "linear"))
    other = task({"task": "s3", "pairs": 4}, steps=4)
    monkeypatch.setitem(SIZES, "small", replace(TOY, tasks={"tracking": other}))
    with pytest.raises(ValueError, match=r"another setting \(steps\)"):
        run_part(PARTS["tracking"], request(tmp_path, "linear"))
    assert read_entries("tracking", tmp_path) == {}  # and no table shows them


def test_another_column_hides_none_and_is_measured_alone(tmp_path, here, monkeypatch):
    run_part(PARTS["tracking"], request(tmp_path))
    before = read_entries("tracking", tmp_path)
    here.clear()
    more = task({"task": "s3", "pairs": 4}, {"task": "parity", "pairs": 4})
    monkeypatch.setitem(SIZES, "small", replace(TOY, tasks={"tracking": more}))
    assert read_entries("tracking", tmp_path) == before
    run_part(PARTS["tracking"], request(tmp_path))
    assert {run.task for run in here} == {"parity"} and len(here) == 2 * 3
    after = read_entries("tracking", tmp_path)
    assert {key: after[key] for key in before} == before and set(after) == {
        *before,
        *(("parity, 4 tokens", m) for m in MIXERS),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", ["mqar", "regression", "tracking"])
def test_another_column_hides_no_committed_row(part, size, monkeypatch):
    monkeypatch.setitem(SIZES, "small", SMALL)
    before = PARTS[part].library(size, ())
    declared = SIZES[size].tasks[part]
    one = replace(declared, columns=(*declared.columns, {**declared.columns[0], "pairs": 3}))
    monkeypatch.setitem(SIZES, size, replace(SIZES[size], tasks={part: one}))
    assert PARTS[part].library(size, ()) == before and len(before) >= 33
    changed = replace(one, shared={**one.shared, "steps": 1})
    monkeypatch.setitem(SIZES, size, replace(SIZES[size], tasks={part: changed}))
    assert PARTS[part].library(size, ()) == []


@pytest.mark.slow
def test_another_context_is_measured_of_the_models_that_are_there(tmp_path, monkeypatch):
    """Or of the same models trained again, at their rate, where their folders are gone."""
    pytest.importorskip("accelerate")
    run_part(PARTS["language"], request(tmp_path, seeds=(0,)))
    before = read_entries("language", tmp_path)
    training = {**TOY.language.training, "context_lengths": (16, 24, 32)}
    monkeypatch.setitem(SIZES, "small", replace(TOY, language=replace(TOY.language, training=training)))
    assert read_entries("language", tmp_path) == before
    took = []
    monkeypatch.setattr("fastweights.training.language.train.loss_curves", took.append)
    run_part(PARTS["language"], request(tmp_path, seeds=(0,)))
    after = read_entries("language", tmp_path)
    assert {key: after[key] for key in before} == before and not took
    assert set(after) == {*before, *(("context 24", mixer) for mixer in MIXERS)}
    new = after["context 24", "linear"]
    assert new.learning_rate == before["held out", "linear"].learning_rate and new.seeds == (0,)
    assert len({before["context 16", "linear"].mean, before["context 32", "linear"].mean, new.mean}) == 3


def test_a_task_of_a_users_own_is_a_part(tmp_path, here, monkeypatch):
    """It is trained at the sizes that are declared for such tasks, and is no part of the pages."""
    monkeypatch.setattr(data.TASKS, "specs", dict(data.TASKS.specs))

    @register_task
    @dataclass(frozen=True, kw_only=True)
    class Mine(data.TASKS["copy"]):
        name: ClassVar[str] = "mine"
        summary: ClassVar[str] = "a copy"

    assert "mine" not in PARTS and known_parts()["mine"].says == "a copy"
    part = find_part("mine")
    path = run_part(part, request(tmp_path, "linear"))
    assert path.name == "mine-small.json" and {run.task for run in here} == {"mine"}
    (entry,) = part.entries(part.rows("small", tmp_path, tmp_path))
    assert (entry.column, entry.label, len(entry.values)) == ("2 pairs, heads of 4", "linear", 2)


def test_a_mixer_is_known_by_its_options_and_label(tmp_path, here):
    """Rows have the name of the mixer and the options that were given; the head size that was found is none of these."""
    choices = (
        MixerChoice("linear"),
        MixerChoice("gdn", {"conv_size": 2}),
        MixerChoice("gdn", {"conv_size": 3}, "short"),
    )
    part = PARTS["tracking"]
    path = run_part(part, Request(mixers=choices, size="small", device="cpu", output=tmp_path, workers=1, seeds=(0,)))
    found = {row.run.get("label"): (row.mixer, row.options, row.run["head_dim"]) for row in read_rows(path)}
    assert found[None][1] in ({}, {"conv_size": 2}) and found["short"] == ("gdn", {"conv_size": 3}, 4)
    assert {label for _, label in read_entries("tracking", tmp_path)} == {"linear", "gdn:conv_size=2", "short"}
    with pytest.raises(ValueError, match="label of mixer 'gdn' must have at most 80 characters and no spaces"):
        request(tmp_path, mixers=(MixerChoice("gdn", {}, "two words"),))


def test_file_names_of_labels():
    assert file_name("gdn") == "gdn" and file_name("a/b") != file_name("a b") and "/" not in file_name("a/b")
    assert run_recall_parts is rate_search.run_recall_parts


def test_language_models_are_in_their_published_block(tmp_path):
    size = SMALL.language
    mixer = match_models(size).of(MixerChoice("palimpsa-d"))
    run = plan_run(size, request(tmp_path), mixer, 1e-3, 0)
    assert run.model["mixer"]["long_memory"] == "own" and run.model["mixer"]["skip_init"] == 1.0


def test_language_models(tmp_path, monkeypatch):
    """Two mixers; close ones take all seeds; a second call trains nothing."""
    pytest.importorskip("accelerate")
    from fastweights.training.language import together

    trained, train = [], together.train_language
    monkeypatch.setattr(together, "train_language", lambda run, **k: trained.append(run) or train(run, **k))
    run_part(PARTS["language"], request(tmp_path))
    found = read_entries("language", tmp_path)
    assert set(found) == {(c, m) for c in ("held out", "context 16", "context 32") for m in MIXERS}
    row = found["held out", "linear"]
    assert len(row.values) == 2 and trainings(row) == 3 and len(trained) == 2 * 3  # close: 100 nats
    losses = {run.learning_rate: None for run in trained}
    for file in tmp_path.glob("trained/language-small/linear/*-seed0/result.json"):
        result = json.loads(file.read_bytes())
        losses[result["run"]["learning_rate"]] = result["held_out_losses"][-1]
    assert row.values[0] == min(losses.values()) == losses[row.learning_rate]
    trained.clear()
    shutil.rmtree(tmp_path / "trained")
    run_part(PARTS["language"], request(tmp_path))
    assert trained == []


def watch_trainings(monkeypatch, diverging=()):
    """The name of the folder of each training that begins; those of these names diverge."""
    from fastweights.training.language import together

    began, train = [], together.train_language

    def watched(run, **options):
        began.append("/".join(Path(run.output).parts[-2:]))
        if began[-1] in diverging:
            raise together.NonFiniteLoss("the loss is nan at step 1")
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", watched)
    return began


@pytest.mark.slow
def test_more_seeds_train_no_grid_again(tmp_path, monkeypatch):
    """Where the board has the first seed, others are trained at its rate and stand behind it; one that diverges counts."""
    pytest.importorskip("accelerate")
    machine = measure_on(monkeypatch, "language")
    run_part(PARTS["language"], request(tmp_path, seeds=(0,)))
    before = read_entries("language", tmp_path)
    assert all(machines(row) == ["the first"] for row in before.values())
    shutil.rmtree(tmp_path / "trained")
    machine["machine"] = "the second"
    row = before["held out", "softmax"]
    began = watch_trainings(monkeypatch, [f"softmax/lr{row.learning_rate!r}-seed1"])
    run_part(PARTS["language"], request(tmp_path, seeds=(0, 1, 2)))
    after = read_entries("language", tmp_path)
    assert set(began) == {
        f"{mixer}/lr{before['held out', mixer].learning_rate!r}-seed{seed}" for mixer in MIXERS for seed in (1, 2)
    }
    for key, row in after.items():
        kept = (0, 1, 2) if row.label == "linear" else (0, 2)
        assert row.seeds == kept and row.values[:1] == before[key].values and len(row.values) == len(kept)
        assert row.values[-1] != row.values[0] and row.learning_rate == before[key].learning_rate
        assert (trainings(row), row.diverged) == (4, 3 - len(kept))
        assert machines(row) == ["the first", "the second"]
    began.clear()
    run_part(PARTS["language"], request(tmp_path, seeds=(0, 1, 2)))
    assert began == [] and read_entries("language", tmp_path) == after
    run_part(PARTS["language"], request(tmp_path, "linear", seeds=(3, 0)))  # another first seed is one more
    assert began == [f"linear/lr{before['held out', 'linear'].learning_rate!r}-seed3"]
    assert read_entries("language", tmp_path)["held out", "linear"].seeds == (0, 1, 2, 3)


@pytest.mark.slow
def test_mixers_of_the_library_count_as_close_ones(tmp_path, monkeypatch):
    """A mixer of one's own takes more seeds where one of the library's results is close, as the library's mixers did."""
    pytest.importorskip("accelerate")
    language = replace(SIZES["small"].language, close=0.5)
    monkeypatch.setitem(SIZES, "small", replace(TOY, language=language))
    library = tmp_path / "library"
    monkeypatch.setattr("fastweights_studies.leaderboard.board.COMMITTED", library)
    path = run_part(PARTS["language"], request(library, "softmax"))
    board = read_rows(path)
    for away, seeds in ((9.0, (0,)), (0.0, (0, 1))):
        write_rows(path, [replace(row, value=row.value + away) for row in board])
        run_part(PARTS["language"], request(tmp_path / f"{away}", "linear"))
        assert read_entries("language", tmp_path / f"{away}")["held out", "linear"].seeds == seeds


def test_mixers_that_are_not_close_take_one_seed():
    from fastweights_studies.leaderboard.language import find_close

    losses = {"a": 3.00, "b": 3.01, "c": 3.05, "d": 3.069, "e": 4.0}
    assert find_close(losses, 0.02) == {"a", "b", "c", "d"} and find_close(losses, 0.005) == set()


def test_a_training_that_diverges_is_counted(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from fastweights.training.language import together

    train = together.train_language

    def diverging(run, **options):
        if run.learning_rate == 1e-2:
            raise together.NonFiniteLoss("the loss is nan at step 1")
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", diverging)
    run_part(PARTS["language"], request(tmp_path, "linear", seeds=(0,)))
    row = read_entries("language", tmp_path)["held out", "linear"]
    assert (row.learning_rate, row.diverged, trainings(row)) == (1e-3, 1, 2)
    (file,) = tmp_path.rglob("diverged.json")
    assert json.loads(file.read_bytes()) == {"why": "the loss is nan at step 1"}
    monkeypatch.setattr(together, "train_language", None)  # nothing is trained again
    run_part(PARTS["language"], request(tmp_path, "linear", seeds=(0,)))


def test_a_mixer_whose_trainings_all_diverge_is_named(tmp_path, monkeypatch):
    """In every column and in the table; it takes no other seed."""
    pytest.importorskip("accelerate")
    from fastweights.training.language import together

    train = together.train_language

    def diverging(run, **options):
        if "softmax" in str(run.model["mixer"]):
            raise together.NonFiniteLoss("the loss is nan at step 1")
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", diverging)
    run_part(PARTS["language"], request(tmp_path))
    found = read_entries("language", tmp_path)
    for column in ("held out", "context 16", "context 32"):
        row = found[column, "softmax"]
        assert (row.values, row.seeds, row.learning_rate, row.diverged, trainings(row)) == ((), (), None, 2, 2)
    assert len(found["held out", "linear"].values) == 1  # none is close to it
    _, lines = table_of(
        PARTS["language"], "small", PARTS["language"].rows("small", tmp_path, tmp_path), [*MIXERS, "vla"]
    )
    assert [line[0] for line in lines] == ["linear", "softmax (keeps every token)", "vla"]
    assert lines[1][3:] == ["diverged"] * 3 and lines[1][1:3] != ["", ""] and lines[2][3:] == ["not run"] * 3


def test_stopped_trainings_leave_the_rows_of_mixers_that_have_ended(tmp_path, monkeypatch):
    from fastweights.training.language import together

    trained, train = [], together.train_language

    def stopping(run, **options):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(run)
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_part(PARTS["language"], request(tmp_path, seeds=(0,)))
    assert {run.learning_rate for run in trained} == set(TOY.language.rates)
    found = read_entries("language", tmp_path)
    assert {mixer for _, mixer in found} == {"linear"} and trainings(found["held out", "linear"]) == 2


@pytest.mark.slow
def test_all_columns_of_a_language_model_have_the_same_seeds_where_writing_is_stopped(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from fastweights_studies import record

    writes, write = [], record.write_bytes

    def stopping(path, content):
        writes.append(path)
        if len(writes) == 3:
            raise OSError("the disk is full")
        write(path, content)

    monkeypatch.setattr(record, "write_bytes", stopping)
    run_part(PARTS["language"], request(tmp_path, seeds=(0,)))
    with pytest.raises(OSError, match="full"):
        run_part(PARTS["language"], request(tmp_path, seeds=(0, 1)))
    columns = {"held out", "context 16", "context 32"}
    found = read_entries("language", tmp_path)
    assert set(found) == {(column, mixer) for column in columns for mixer in MIXERS}
    assert all(row.seeds == (0,) for row in found.values())
    run_part(PARTS["language"], request(tmp_path, seeds=(0, 1)))
    assert all(row.seeds == (0, 1) for row in read_entries("language", tmp_path).values())


def test_language_models_are_refused_on_a_device_that_their_trainer_does_not_take(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="device must be cuda for language models"):
        run_part(PARTS["language"], request(tmp_path))


@pytest.mark.slow
def test_language_models_in_processes_of_their_own(tmp_path):
    pytest.importorskip("accelerate")
    run_part(PARTS["language"], request(tmp_path, workers=2, seeds=(0,)))
    assert len(read_entries("language", tmp_path)) == 2 * 3


def test_rules_without_training(tmp_path, monkeypatch):
    """A mixer stands for its rule; those without one are refused where they are alone."""
    monkeypatch.setattr("fastweights_studies.leaderboard.untrained.SIZES", (4,))
    path = run_part(PARTS["rules"], request(tmp_path, "softmax", "linear", "kda"))
    found = read_entries("rules", tmp_path)
    assert {mixer for _, mixer in found} == {"linear", "gdn"} and len(found) == 2 * 4
    rows = select(read_rows(path), measure="distance", mixer="gdn", column={"stream": "noise", "channels": 4})
    assert found["noise, d = 4", "gdn"].values == tuple(row.value for row in rows)
    head, lines = table_of(PARTS["rules"], "small", read_rows(path), [])
    assert head[1] == "interference, d = 4" and lines[-1][1:] == ["not run"] * 4
    with pytest.raises(ValueError, match="softmax keeps every token"):
        run_part(PARTS["rules"], request(tmp_path, "softmax"))
