"""Recall of mixed pairs in one block: what is trained, kept, chosen, shown and predicted; grids that widen."""

import json
import signal
import time
from dataclasses import replace

import pytest
import torch
from fastweights_studies import rate_search
from fastweights_studies.commands._options import stopping_after
from fastweights_studies.leaderboard import PARTS, SIZES, Request, load_board, run_part, table_of
from fastweights_studies.leaderboard.cells import TIES
from fastweights_studies.leaderboard.effects import block_effects
from fastweights_studies.leaderboard.prediction import predict_minutes
from fastweights_studies.leaderboard.run import plan_part
from fastweights_studies.leaderboard.tables import describe_visible
from fastweights_studies.leaderboard.trainings import match_mixer
from fastweights_studies.rate_search import search_rates
from fastweights_studies.record import Origin, Row, select

from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.stopping import Stopped, StopSignals
from fastweights.training import RecallExperiment, WorkerError
from fastweights.training.recall.train import Training

from .toy import TOY, make_row, read_entries, train_here

COLUMN = "mqar-shuffled, heads of 4"
DECLARED = dict(SIZES)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(SIZES, "small", TOY)


@pytest.fixture
def here(monkeypatch):
    return train_here(monkeypatch)


def request(folder, *mixers, **more):
    choices = tuple(map(MixerChoice, mixers))
    return Request(**{"mixers": choices, "size": "small", "device": "cpu", "output": folder, "workers": 1, **more})


def test_recall_is_trained_in_one_block_and_kept_by_pairs(tmp_path, here):
    path = run_part(PARTS["recall"], request(tmp_path, "mamba2", "softmax"))
    for name, options in (("mamba2", {"long_memory": "windows", "output_gate": None}), ("softmax", {"conv_size": 4})):
        (entry,) = (one for key, one in read_entries("recall", tmp_path).items() if key == (COLUMN, name))
        assert entry.seeds == (0, 1) and entry.rows[0].options == {} and entry.rows[0].column["block"] == "matched"
        runs = [run for run in here if run.choice.label == name]
        assert all(options.items() <= run.choice.options.items() and run.seed_by_name for run in runs)
        measures = {row.measure for row in entry.rows}
        assert measures == {"accuracy", "steps_to_90"} | {
            f"{m}_{n}" for m in ("accuracy", "steps_to_90") for n in (2, 3)
        }
        folder = tmp_path / f"trained/recall-small/{file_name(COLUMN)}/{name}"
        (later,) = [json.loads(file.read_bytes()) for file in folder.glob("seed1/runs/*.json")]
        assert select(entry.rows, measure="accuracy_3", seed=1)[0].value == later["tested"]["3"]
        assert select(entry.rows, measure="accuracy", seed=1)[0].value == sum(later["tested"].values()) / 2
        assert select(entry.rows, measure="steps_to_90", seed=1)[0].value is None
    here.clear()
    run_part(PARTS["recall"], request(tmp_path, "gdn", "softmax"))
    assert {run.choice.label for run in here} == {"gdn"}  # joins by its name
    head, lines = table_of(PARTS["recall"], "small", load_board(path).rows, ["mamba2", "softmax", "gdn", "rls"])
    assert head[-2:] == [COLUMN, f"{COLUMN}, steps to 90%"] and len({len(line) for line in lines}) == 1
    assert {line[-1] for line in lines} == {"never", "not run"} and "(1=)" in lines[0][-2]


def test_blocks_and_published_mixers_have_boards_of_their_own(tmp_path, here):
    for part, gate in (("recall-published", None), ("recall-blocks", "silu")):
        run_part(PARTS[part], request(tmp_path, "deltanet", seeds=(0,)))
        assert {run.choice.options.get("output_gate") for run in here} == {gate} and read_entries(part, tmp_path)
        here.clear()


def test_other_tasks_are_trained_in_one_block_by_the_recipe_of_recall(tmp_path, here):
    run_part(PARTS["tasks"], request(tmp_path, "gla"))
    (entry,) = read_entries("tasks", tmp_path).values()
    assert entry.column == "copy, 3 tokens" and entry.seeds == (0, 1)
    assert {row.measure for row in entry.rows} == {"accuracy", "steps_to_90"}
    assert {run.choice.options["output_gate"] for run in here} == {None} and not any(run.mixture for run in here)
    assert {run.seed_by_name for run in here} == {True} and {run.validation_examples for run in here} == {8}
    here.clear()
    run_part(PARTS["regression-matched"], request(tmp_path, "gla"))
    (entry,) = read_entries("regression-matched", tmp_path).values()
    assert {row.measure for row in entry.rows} == {"error", "exact_error"}
    assert {run.choice.options["output_gate"] for run in here} == {None}


@pytest.mark.parametrize("size", DECLARED)
def test_parts_in_one_block_share_their_recipe(size):
    recall, tasks, regression = (DECLARED[size].task(name) for name in ("recall", "tasks", "regression-matched"))
    for part in (tasks, regression):
        assert (part.rates, part.limits, part.seeds, part.main) == (
            recall.rates,
            recall.limits,
            recall.seeds,
            recall.main,
        )
        assert part.shared["validation_examples"] and part.shared["seed_by_name"] and not part.mixed
        assert {column["block"] for column in part.columns} == {"matched"}
        for column in part.columns:
            RecallExperiment(**part.experiment(column), mixers=("linear",), learning_rates=part.rates[:1]).runs()
    assert tasks.shared["stop_at"] == 0.99 and "stop_at" not in regression.shared


def grid(best, tmp_path, monkeypatch, limits=(1e-4, 1.0), fails=()):
    """The rates that a search trains where accuracy is best at one rate."""
    trained = []

    def train(parts, outputs, **options):
        results = {}
        for name, experiment in parts.items():
            for run in experiment.runs():
                trained.append((run.learning_rate, run.seed))
            if any(run.learning_rate in fails for run in experiment.runs()):
                raise WorkerError("lost")
            results[name] = [
                replace(result, run=run.record(), accuracy=-abs(run.learning_rate - best)) for run in experiment.runs()
            ]
        return results

    first = RecallExperiment(mixers=("linear",), pairs=(2,), learning_rates=(1e-3, 1e-2, 3e-2), seeds=(0, 1), steps=1)
    result = Training(first.runs()[0]).result()
    result = replace(result, accuracies=[0.0], accuracy_steps=[1], losses=[1.0])
    monkeypatch.setattr(rate_search, "run_recall_parts", train)
    searches, failure = search_rates({"a": first}, {"a": tmp_path}, limits=limits)
    return trained, searches, failure


@pytest.mark.parametrize(
    ("best", "added", "chosen"),
    [(1e-2, [], 1e-2), (9e-2, [0.09, 0.3], 0.09), (5.0, [0.09, 0.3, 1.0], 1.0), (0.0, [1e-4], 1e-4)],
)
def test_a_grid_widens_until_its_best_rate_lies_inside_or_to_the_limits(best, added, chosen, tmp_path, monkeypatch):
    trained, searches, failure = grid(best, tmp_path, monkeypatch)
    assert failure is None and [one for one in trained if one[1] == 0][3:] == [(rate, 0) for rate in added]
    assert trained[-1] == (chosen, 1) and len(searches["a"].grid) == 3 + len(added)
    assert len(grid(best, tmp_path, monkeypatch, limits=None)[0]) == 4


def test_a_grid_that_stays_open_chooses_nothing(tmp_path, monkeypatch):
    trained, searches, failure = grid(9e-2, tmp_path, monkeypatch, fails=(0.09,))
    assert isinstance(failure, WorkerError) and searches == {} and all(seed == 0 for _, seed in trained)


def first_values(name, block):
    size = TOY.tasks["recall"]
    column = {**size.columns[0], "block": block}
    mixer = match_mixer(size, column, MixerChoice(name))
    (run,) = RecallExperiment(
        **size.experiment(column), mixers=(mixer.choice,), intermediate_size=mixer.intermediate_size, learning_rates=(1e-3,),
        seeds=(5,),
    ).runs()  # fmt: skip
    return Training(run).model.state_dict()


def test_rules_that_differ_in_nothing_else_begin_with_the_same_weights():
    base = first_values("deltanet", "matched")
    for name, own in (
        ("efla", ()),
        ("longhorn", ()),
        ("linear", ("gain",)),
        ("gdn", ("decay",)),
        ("pdn", ("preconditioner",)),
    ):
        other = first_values(name, "matched")
        differing = [key for key in set(base) | set(other) if not any(f".{part}." in key for part in own)]
        differing = [
            key for key in differing if key not in base or key not in other or base[key].shape == other[key].shape
        ]
        assert all(torch.equal(base[key], other[key]) for key in differing), name
        assert sum(".mixer." not in key for key in differing) > 4
    alike = first_values("efla", "matched")
    assert set(alike) == set(base) and all(torch.equal(alike[key], base[key]) for key in base)  # also in their sizes


def step_row(mixer, ms, date="2026-01-01", setting="recall", **column):
    origin = Origin(device="A GPU", versions={}, commit="unknown", date=date)
    return Row(
        task="recall_step", measure="step_ms", unit="ms", mixer=mixer, value=ms, origin=origin,
        column={"setting": setting, "replayed": True, **column},
    )  # fmt: skip


def test_minutes_are_predicted_from_measured_steps_and_what_sharing_gains():
    steps = {"gdn": 60_000, "mine": 60_000}
    alone = [step_row("gdn", 3.0), step_row("gdn", 9.0, setting="vla"), step_row("linear", 1.0)]
    assert predict_minutes(steps, alone, 8)["GPU minutes, at most"] == round(3 + 2)  # another mixer: the median
    assert predict_minutes(steps, alone, 8)["steps measured of mixers"] == "1 of 2"
    shared = [*alone, step_row("gdn", 6.0, processes=8)]
    found = predict_minutes({"gdn": 600_000}, shared, 8)
    assert found == {
        "GPU minutes, at most": 8, "steps measured of mixers": "1 of 1", "processes": "8, 4.0 times as fast as one",
    }  # fmt: skip
    assert predict_minutes({"gdn": 600_000}, shared, 1)["GPU minutes, at most"] == 30
    assert "unknown" in predict_minutes(steps, [], 8)["GPU minutes"]


def test_a_plan_counts_the_steps_that_are_missing(tmp_path, here):
    assert plan_part(PARTS["recall"], request(tmp_path, "linear", "gdn"))["steps, at most"] == 2 * 3 * 4
    run_part(PARTS["recall"], request(tmp_path, "linear"))
    assert plan_part(PARTS["recall"], request(tmp_path, "linear", "gdn"))["steps, at most"] == 3 * 4
    full = SIZES["full"].task("recall")
    assert (len(full.seeds_of("gdn")), len(full.seeds_of("vla")), len(full.main)) == (5, 2, 12)
    assert len(full.seeds_of("a mixer from elsewhere")) == 5


def test_chosen_columns_alone_are_trained(tmp_path, here):
    chosen = request(tmp_path, "linear", columns=(COLUMN,))
    one = replace(TOY.task("recall"), columns=({"task": "mqar", "head_dim": 4, "block": "matched"},))
    two = replace(one, columns=(*one.columns, *TOY.task("recall").columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "small", replace(TOY, tasks={**TOY.tasks, "recall": two}))
        assert plan_part(PARTS["recall"], request(tmp_path, "linear"))["steps, at most"] == 2 * 3 * 4
        plan = plan_part(PARTS["recall"], chosen)
        assert (plan["steps, at most"], plan["trainings per mixer, at most"]) == (3 * 4, 3)
        run_part(PARTS["recall"], chosen)
        assert {column for column, _ in read_entries("recall", tmp_path)} == {COLUMN}
        here.clear()
        run_part(PARTS["recall"], request(tmp_path, "linear", columns=("heads of 4", "mqar-")))
        assert {run.task for run in here} == {"mqar"}  # the other column has its rows
    with pytest.raises(ValueError, match="columns must be texts in titles of recall, got 'heads of 7'; it has mqar"):
        PARTS["recall"].check_columns(request(tmp_path, "linear", columns=("heads of 7",)))
    with pytest.raises(ValueError, match="columns must be left out for rules"):
        PARTS["rules"].check_columns(request(tmp_path, "gdn", columns=("a",)))


def test_a_command_stops_after_its_minutes(signals_arrive):
    with pytest.raises(Stopped) as stopped, StopSignals(), stopping_after(0.002):
        time.sleep(20)
    assert stopped.value.exit_code == 128 + signal.SIGUSR1
    with StopSignals(), stopping_after(0.01):
        pass
    time.sleep(0.7)  # cancelled
    with pytest.raises(ValueError, match="--minutes must be positive"), stopping_after(-1):
        pass


def test_effects_of_parts_are_paired_differences_from_the_matched_block():
    def entries(part, values, **more):
        rows = [
            make_row(part, mixer=mixer, seed=seed, value=x, **more)
            for mixer, xs in values.items()
            for seed, x in enumerate(xs)
        ]
        return PARTS[part].entries(rows)

    matched = entries("recall", {"gdn": (0.5, 0.7, 0.9), "linear": (0.5, 0.6, 0.7), "rls": (0.5,)})
    gated = entries(
        "recall-blocks", {"gdn": (0.3, 0.501, 0.702), "linear": (0.6, 0.5, 0.7), "rls": (0.1,), "kda": (0.1, 0.2)}
    )
    effects = block_effects([*gated, *matched])
    assert set(effects) == {("gdn", "with-gate"), ("linear", "with-gate")}
    assert effects["gdn", "with-gate"].sign == -1 and effects["gdn", "with-gate"].mean == pytest.approx(-0.199)
    assert effects["linear", "with-gate"].tied and effects["gdn", "with-gate"].confidence > 0.97
    recall = PARTS["recall"]
    assert "with-gate" not in describe_visible(recall, matched) and "0." in describe_visible(recall, matched)
    assert describe_visible(recall, entries("recall", {"gdn": (0.5,), "linear": (0.5,)})) == ""
    two = entries("recall", {"gdn": (0.5, 0.6), "linear": (0.6, 0.1)})
    assert ": more than 1. Where it is larger" in describe_visible(recall, two)
    assert "nats" in describe_visible(PARTS["language"], entries("language", {"gdn": (2.0, 2.1), "kda": (2.2, 2.2)}))
    assert TIES in PARTS["recall"].explanation() and TIES in PARTS["mqar"].explanation()
