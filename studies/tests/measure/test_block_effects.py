"""Effects of parts of the block: what is compared, what is kept, what is said."""

import sys
from dataclasses import replace

import pytest
import torch
from fastweights_studies.measure import block_effects as module
from fastweights_studies.record import read_rows

from fastweights.layers import build_mixer, registry
from fastweights.testing import check_mixer
from studies.tests.leaderboard.toy import NOWHERE, train_here


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch):
    """The mixer that one effect registers is gone after the test."""
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    monkeypatch.delitem(sys.modules, module.WINDOWED, raising=False)


@pytest.mark.slow
def test_both_sides_of_an_effect_are_trained_from_paired_seeds_and_compared(tmp_path, monkeypatch, capsys):
    small = {"width": 16, "batch_size": 4, "steps": 4, "learning_rates": (1e-3, 1e-2), "seeds": (0, 1)}
    monkeypatch.setitem(module.SIZES, "cpu", small)
    monkeypatch.setattr(
        module, "SETTINGS", {**module.SETTINGS, "test_examples": 8, "validation_examples": 8, "evaluations": 1}
    )
    runs = train_here(monkeypatch)
    given = [
        "--effects",
        "gdn-windows,softmax-convolution",
        "--runs",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["block_effects", *given])
    module.main()
    assert {run.seed_by_name for run in runs} == {True} and len(runs) == 2 * 2 * 2 * 2
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["gdn-windows", "softmax-convolution"] and "difference" in said[0]
    rows = [replace(row, origin=NOWHERE) for row in read_rows(tmp_path / "block-effects-cpu.json")]
    assert len(rows) == 2 * 2 * 2 * 2 and {row.column["side"] for row in rows} == {"before", "after"}
    windows = [row for row in rows if row.column["effect"] == "gdn-windows" and row.column["side"] == "after"]
    assert {row.options["long_memory"] for row in windows} == {"windows"} and {row.seed for row in windows} == {0, 1}
    module.main()
    again = read_rows(tmp_path / "block-effects-cpu.json")
    assert len(runs) == 16 and [replace(row, origin=rows[0].origin) for row in again] == rows


@pytest.mark.parametrize("name", module.EFFECTS)
def test_every_effect_fits_its_layer_at_both_sizes(name, monkeypatch):
    for size, seeds in (("cpu", 3), ("cuda", 10)):
        monkeypatch.setitem(module.SIZES, "cpu", module.SIZES[size])
        experiment = module.experiment_of(module.EFFECTS[name], "cpu", None)
        assert len(experiment.mixers) == 2 and experiment.stop_at == 0.99 and len(experiment.seeds) == seeds


@pytest.mark.parametrize("window", (4.0, 100.0))
def test_a_mixer_begins_with_the_window_that_is_measured_in_all_heads(window):
    module.experiment_of(module.EFFECTS["gdn-short-windows"], "cpu", None)  # registers it
    mixer = build_mixer("gdn-window", hidden_size=32, num_heads=4, first_window=window)
    g = mixer.decay(torch.zeros(1, 3, 32))
    torch.testing.assert_close(1 / (1 - g.exp()), torch.full((1, 3, 4), window), rtol=1e-4, atol=0)
    check_mixer(mixer.double())
