"""The comparisons of whole models, as far as no GPU is needed."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fastweights_studies.measure import training_steps
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.measure.models import FLA, Model, make_step_rows, read_steps
from fastweights_studies.measure.rows import replace_rows
from fastweights_studies.measure.training_steps import COMPARISONS, GATED, PEER, Comparison
from fastweights_studies.record import Origin, read_rows

GDN, KDA, PGDN, VLA, RLS = (Model(mixer=mixer) for mixer in ("gdn", "kda", "pgdn", "vla", "rls"))
WITHIN = [one for one in COMPARISONS if one.base.library != FLA]


@pytest.mark.parametrize("comparison", WITHIN, ids=[one.model.name for one in WITHIN])
def test_models_differ_in_their_mixer_or_their_mlp_or_in_what_is_compiled_or_replayed(comparison: Comparison) -> None:
    """In one of these alone."""
    model, base = comparison.model.configuration(), comparison.base.configuration()
    assert [
        model.mixers() != base.mixers(), comparison.model.mlp != comparison.base.mlp, comparison.model.way != comparison.base.way
    ].count(True) == 1  # fmt: skip
    assert comparison.base.mlp is None
    for size in ("vocab_size", "hidden_size", "tie_word_embeddings"):
        assert getattr(model, size) == getattr(base, size)


def test_both_sides_are_compiled_and_replayed() -> None:
    one = Comparison(PGDN, GDN, 8).run(compiled="blocks", replayed=True)
    assert one.model.way == one.base.way == ("blocks", True) and (one.model.mixer, one.base.mixer) == ("pgdn", "gdn")
    assert one.run(compiled=None, replayed=False) == Comparison(PGDN, GDN, 8)


def test_titles_and_names_of_all_models_differ() -> None:
    """A title says all that a model is, and a name does so without spaces."""
    assert len({one.model.title for one in COMPARISONS}) == len(COMPARISONS)
    models: list[Model] = []
    for model in (model for one in COMPARISONS for model in (one.model, one.base)):
        if model not in models:
            models.append(model)
    assert len({model.title for model in models}) == len({model.name for model in models}) == len(models)
    assert not any(" " in model.name for model in models)
    assert Model(preset="gka-1b", options={"sketch": 32}).title == "gka-1b with sketch 32"
    assert Model(preset="gka-440m", options={"iterations": 20}).title == "gka-440m with 20 iterations"
    assert training_steps.HYBRID.title == "gka-hybrid-2.8b with gdn"
    assert GATED.run(compiled="blocks", replayed=True).title == "24 layers of gated gdn, compiled by blocks, replayed"
    assert PEER.run(compiled="whole", replayed=False).title == "24 layers of flash-linear-attention's gdn, compiled"
    assert Model(mixer="lattice", options={"objective": "encode"}).title == "24 layers of lattice-encode"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=[one.model.name for one in COMPARISONS])
def test_rows_are_read_as_the_models_that_they_are_of(comparison: Comparison) -> None:
    rows = [
        row
        for model, ms in ((comparison.base, 2.0), (comparison.model, 3.0))
        for row in make_step_rows(comparison.model, model, comparison.batch, 2048, describe("a GPU"), {"step_ms": ms})
    ]
    ((base, model),) = read_steps(rows)
    assert (base.model, model.model) == (comparison.base, comparison.model)
    assert (base.values, model.values, base.batch) == ({"step_ms": 2.0}, {"step_ms": 3.0}, comparison.batch)


def test_the_peer_has_the_size_of_the_model_beside_it() -> None:
    """Its values are as wide as its keys, and both have an output gate; only the bias terms of its gates are its own."""
    fla = pytest.importorskip("fla.models", reason="needs flash-linear-attention")
    del fla
    with torch.device("meta"):
        ours, theirs = (training_steps.build(one)[0] for one in (GATED, PEER))
    count, peers = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    assert abs(count - peers) <= 1e-3 * peers


def test_the_peer_is_asked_for_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_steps, "is_installed", lambda: False)
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", GATED.title])
    with pytest.raises(SystemExit, match="flash-linear-attention, which is not installed"):
        training_steps.main()


def test_unknown_comparisons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", "palimpsa"])
    with pytest.raises(SystemExit, match="--only must name comparisons, of palimpsa-d-760m"):
        training_steps.main()


def test_layers_of_gated_kalmanet_are_changed_alone() -> None:
    hybrid, fewer, gdn = (
        Model(preset="gka-hybrid-2.8b", options=options).configuration().mixers()
        for options in ({}, {"iterations": 20}, {"memory": "gdn"})
    )
    for (mixer, options), (_, with_fewer), (other, _) in zip(hybrid, fewer, gdn, strict=True):
        assert with_fewer == (options | {"iterations": 20} if mixer == "gka" else options)
        assert other == ("gdn" if mixer == "gka" else mixer)
    assert {mixer for mixer, _ in gdn} == {"gdn", "softmax"} == training_steps.HYBRID.mixers()


class FakeTrained:
    """In place of a model on a GPU. The n-th timed step of all takes n ms."""

    timed = 0
    alive: list[tuple[str, set[str]]] = []  # the mixers of what was built, and of what there was then
    fails: dict[str, type[Exception]] = {}
    made: list[weakref.ref[FakeTrained]] = []

    def __init__(self, model: Model, batch: int, length: int) -> None:
        name = str(model.mixer)
        self.alive.append((name, {one.name for made in self.made if (one := made())}))
        self.made.append(weakref.ref(self))
        self.itself = self  # freed by gc.collect() alone, as is the real one
        self.name, self.steps = name, 0
        self.times: list[float] = []

    def step(self) -> None:
        self.steps += 1

    def timed_step(self) -> None:
        if self.name in self.fails:
            raise self.fails[self.name]("too much")
        assert self.steps  # that may compile again
        FakeTrained.timed += 1
        self.times.append(self.timed)

    def values(self) -> dict[str, Any]:
        spread = Milliseconds(self.times[0], min(self.times), max(self.times))
        return {"step_ms": spread, "tokens_per_second": 1.0, "activations_bytes": 1.0, "first_step_s": 1.0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrained]:
    for name, value in {"timed": 0, "alive": [], "fails": {}, "made": []}.items():
        monkeypatch.setattr(FakeTrained, name, value)
    monkeypatch.setattr(training_steps, "Trained", FakeTrained)
    return FakeTrained


def compare(pairs: list[tuple[Model, Model, int]]) -> list[list[tuple[str, list[float]]]]:
    """Of every comparison the mixers, base first, and the least and largest time of two steps."""
    kept: training_steps.Kept = {}
    return [
        [
            (str(model.mixer), list(values["step_ms"][1:]))
            for model, values in training_steps.compare(Comparison(*pair), 2048, 2, kept)
        ]
        for pair in pairs
    ]


def test_a_base_stays_for_the_comparisons_that_share_it_and_is_timed_with_each(fake: type[FakeTrained]) -> None:
    found = compare([(KDA, GDN, 8), (PGDN, GDN, 8), (VLA, GDN, 4), (PGDN, KDA, 4)])
    assert [name for name, _ in fake.alive] == ["gdn", "kda", "pgdn", "gdn", "vla", "kda", "pgdn"]
    assert not any(fake.alive[place][1] for place in (0, 3, 5))  # nothing else is there when a base is built
    assert found[0] == [("gdn", [1, 3]), ("kda", [2, 4])] and found[1] == [("gdn", [5, 7]), ("pgdn", [6, 8])]
    assert [[name for name, _ in one] for one in found[2:]] == [["gdn", "vla"], ["kda", "pgdn"]]


def test_a_model_beside_itself_is_measured_alone(fake: type[FakeTrained]) -> None:
    assert compare([(GDN, GDN, 8)]) == [[("gdn", [1, 2])]]
    assert [name for name, _ in fake.alive] == ["gdn"]


@pytest.mark.slow
def test_a_comparison_that_fails_costs_no_other_nor_the_rows_of_another_process(
    fake: type[FakeTrained], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own rows come again with the next write where the other process lost them. What a comparison held is free when the next
    is built."""
    file, origin = tmp_path / "training-steps-a-gpu.json", describe("a GPU")
    other = Model(mixer="mesa")

    def written_meanwhile(device: str) -> Origin:
        """Called before every write: another process has written its rows alone."""
        file.unlink(missing_ok=True)
        replace_rows(file, make_step_rows(other, other, 8, 2048, origin, {"step_ms": 1.0}))
        return origin

    fake.fails.update(kda=torch.OutOfMemoryError, pgdn=ValueError)
    monkeypatch.setattr(training_steps, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(training_steps, "describe", written_meanwhile)
    monkeypatch.setattr(training_steps.tuning, "keep_choices", lambda: None)
    options = ["--mixers", "kda,pgdn,vla,rls", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["training_steps.py", *options])
    with pytest.raises(SystemExit) as raised:
        training_steps.main()
    assert str(raised.value).splitlines() == [
        "not measured:",
        "24 layers of kda: OutOfMemoryError: too much",
        "24 layers of pgdn: ValueError: too much",
    ]
    assert [model.model for _, model in read_steps(read_rows(file))] == [other, VLA, RLS]
    assert fake.alive == [
        ("gdn", set()), ("kda", {"gdn"}), ("gdn", set()), ("pgdn", {"gdn"}), ("gdn", set()), ("vla", {"gdn"}),
        ("rls", {"gdn"}),
    ]  # fmt: skip
