"""Effects of parts of the block: what is compared, what is kept, what is said."""

import sys
from dataclasses import replace

import pytest
from fastweights_studies.measure import block_effects as module
from fastweights_studies.record import read_rows

from studies.tests.leaderboard.toy import NOWHERE, train_here


def test_both_sides_of_an_effect_are_trained_from_paired_seeds_and_compared(tmp_path, monkeypatch, capsys):
    small = {"width": 16, "batch_size": 4, "steps": 4, "learning_rates": (1e-3, 1e-2), "seeds": (0, 1, 2)}
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
    assert {run.seed_by_name for run in runs} == {True} and len(runs) == 2 * 2 * 2 * 3
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["gdn-windows", "softmax-convolution"] and "difference" in said[0]
    rows = [replace(row, origin=NOWHERE) for row in read_rows(tmp_path / "block-effects-cpu.json")]
    assert len(rows) == 2 * 2 * 3 * 2 and {row.column["side"] for row in rows} == {"before", "after"}
    windows = [row for row in rows if row.column["effect"] == "gdn-windows" and row.column["side"] == "after"]
    assert {row.options["long_memory"] for row in windows} == {"windows"} and {row.seed for row in windows} == {0, 1, 2}
    module.main()
    again = read_rows(tmp_path / "block-effects-cpu.json")
    assert len(runs) == 24 and [replace(row, origin=rows[0].origin) for row in again] == rows


@pytest.mark.parametrize("name", module.EFFECTS)
def test_every_effect_fits_its_layer_at_both_sizes(name, monkeypatch):
    for size, seeds in (("cpu", 3), ("cuda", 10)):
        monkeypatch.setitem(module.SIZES, "cpu", module.SIZES[size])
        experiment = module.experiment_of(module.EFFECTS[name], "cpu", None)
        assert len(experiment.mixers) == 2 and experiment.stop_at == 0.99 and len(experiment.seeds) == seeds
