"""The comparisons of whole models, as far as no GPU is needed."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fastweights_studies.measure import training_steps
from fastweights_studies.measure.training_steps import (
    COMPARISONS,
    PEER,
    SAME_AS_PEER,
    Comparison,
    both,
    compiled,
    configuration,
)

GDN, KDA, PGDN, VLA, RLS = (f"24 layers of {mixer}" for mixer in ("gdn", "kda", "pgdn", "vla", "rls"))
WITHIN = [one for one in COMPARISONS if not one.base.startswith(PEER)]


@pytest.mark.parametrize("comparison", WITHIN, ids=[one.model for one in WITHIN])
def test_models_differ_in_their_mixer_alone_or_in_what_is_compiled_or_replayed(comparison: Comparison) -> None:
    model, base = (configuration(name) for name in (comparison.model, comparison.base))
    same_layers = model.mixers() == base.mixers()
    assert same_layers == bool(set(comparison.model.split(", ")[1:]) - set(comparison.base.split(", ")[1:]))
    for size in ("vocab_size", "hidden_size", "tie_word_embeddings"):
        assert getattr(model, size) == getattr(base, size)


def test_both_sides_are_compiled_and_replayed() -> None:
    one = both(Comparison("pgdn", "gdn", 8), "blocks", replayed=True)
    assert [compiled(name) for name in one[:2]] == ["blocks", "blocks"]
    assert all("replayed" in name.split(", ") for name in one[:2])
    assert both(one, None, replayed=False) == one


def test_names_of_all_comparisons_differ() -> None:
    assert len({one.model for one in COMPARISONS}) == len(COMPARISONS)


def test_the_peer_has_the_size_of_the_model_beside_it() -> None:
    """Its values are as wide as its keys, and both have an output gate; only the bias terms of its gates are its own."""
    fla = pytest.importorskip("fla.models", reason="needs flash-linear-attention")
    del fla
    with torch.device("meta"):
        ours, theirs = (training_steps.build(name)[0] for name in (SAME_AS_PEER, PEER))
    count, peers = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    assert abs(count - peers) <= 1e-3 * peers


def test_the_peer_is_asked_for_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_steps, "is_installed", lambda: False)
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", SAME_AS_PEER])
    with pytest.raises(SystemExit, match="flash-linear-attention, which is not installed"):
        training_steps.main()


def test_unknown_comparisons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", "palimpsa"])
    with pytest.raises(SystemExit, match="--only must name comparisons, of palimpsa-d-760m"):
        training_steps.main()


def test_layers_of_gated_kalmanet_are_changed_alone() -> None:
    hybrid, fewer, gdn = (
        configuration(f"gka-hybrid-2.8b{change}").mixers() for change in ("", " with 20 iterations", " with gdn")
    )
    for (mixer, options), (_, with_fewer), (other, _) in zip(hybrid, fewer, gdn, strict=True):
        assert with_fewer == (options | {"iterations": 20} if mixer == "gka" else options)
        assert other == ("gdn" if mixer == "gka" else mixer)
    assert {mixer for mixer, _ in gdn} == {"gdn", "softmax"}


class FakeTrained:
    """In place of a model on a GPU. The n-th timed step of all takes n ms."""

    timed = 0
    alive: list[tuple[str, set[str]]] = []  # what was built, and what there was then
    fails: dict[str, type[Exception]] = {}
    made: list[weakref.ref[FakeTrained]] = []

    def __init__(self, name: str, batch: int, length: int) -> None:
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

    def row(self) -> dict[str, Any]:
        times = list(self.times)
        return {"step, ms": [times[0]], "times": times, "tokens/s": 1.0, "activations, GiB": 1.0, "first step, s": 1.0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrained]:
    for name, value in {"timed": 0, "alive": [], "fails": {}, "made": []}.items():
        monkeypatch.setattr(FakeTrained, name, value)
    monkeypatch.setattr(training_steps, "Trained", FakeTrained)
    return FakeTrained


def test_a_base_stays_for_the_comparisons_that_share_it_and_is_timed_with_each(fake: type[FakeTrained]) -> None:
    kept: training_steps.Kept = {}
    pairs = [(KDA, GDN, 8), (PGDN, GDN, 8), (VLA, GDN, 4), (PGDN, KDA, 4)]
    rows = [training_steps.compare(Comparison(*pair), 2048, 2, kept)["models"] for pair in pairs]
    built = [name for name, _ in fake.alive]
    assert built == [GDN, KDA, PGDN, GDN, VLA, KDA, PGDN]
    assert not any(fake.alive[place][1] for place in (0, 3, 5))  # nothing else is there when a base is built
    assert [list(row) for row in rows] == [[base, model] for model, base, _ in pairs]
    assert [row["times"] for row in rows[0].values()] == [[1, 3], [2, 4]]
    assert [row["times"] for row in rows[1].values()] == [[5, 7], [6, 8]]


def test_a_model_beside_itself_is_measured_alone(fake: type[FakeTrained]) -> None:
    row = training_steps.compare(Comparison(GDN, GDN, 8), 2048, 2, {})
    assert [name for name, _ in fake.alive] == list(row["models"]) == [GDN]
    assert row["models"][GDN]["times"] == [1, 2] and row["step of the base"] == 1


def test_a_comparison_that_fails_costs_no_other_nor_the_rows_of_another_process(
    fake: type[FakeTrained], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own rows come again with the next write where the other process lost them. What a comparison held is free when the next
    is built."""
    file = tmp_path / "steps.json"

    def written_meanwhile() -> dict[str, Any]:
        """Called before every write: another process has written its rows alone."""
        file.write_text(json.dumps({"comparisons": {"of another process": 1}}))
        return {}

    fake.fails.update({KDA: torch.OutOfMemoryError, PGDN: ValueError})
    monkeypatch.setattr(training_steps, "kept_rows", lambda *names: (file, "a GPU", {}))
    monkeypatch.setattr(training_steps, "describe", written_meanwhile)
    monkeypatch.setattr(training_steps.tuning, "keep_choices", lambda: None)
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--mixers", "kda,pgdn,vla,rls"])
    with pytest.raises(SystemExit) as raised:
        training_steps.main()
    assert str(raised.value).splitlines() == [
        "not measured:",
        f"{KDA}: OutOfMemoryError: too much",
        f"{PGDN}: ValueError: too much",
    ]
    assert list(json.loads(file.read_text())["comparisons"]) == ["of another process", VLA, RLS]
    assert fake.alive == [
        (GDN, set()), (KDA, {GDN}), (GDN, set()), (PGDN, {GDN}), (GDN, set()), (VLA, {GDN}), (RLS, {GDN}),
    ]  # fmt: skip


def test_a_loss_that_is_no_number_is_written_as_null() -> None:
    one = object.__new__(training_steps.Trained)
    one.parameters, one.memory, one.first_step, one.loss, one.times = 1, 1.0, 1.0, float("nan"), [1.0]
    one.tokens = torch.zeros(1, 1)
    assert one.row()["first loss"] is None
    one.loss = 2.0
    assert one.row()["first loss"] == 2.0
