"""`fastweights recall` on tasks that are not recall: their own measure in table, file and plots."""

import json

import pytest

from fastweights.cli import main

SIZES = "--width 8 --heads 2 --steps 20 --batch-size 8 --learning-rates 0.01 --test-examples 32 --workers 1"


@pytest.mark.slow
def test_regression_is_ranked_by_its_error(tmp_path, capsys):
    command = ["recall", "--task", "regression", "--mixers", "linear,rls", "--pairs", "6", *SIZES.split()]
    assert main([*command, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "6 examples" in printed and "best 0." in printed and "accuracy" not in printed
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    errors = {run["run"]["mixer"]: run["error"] for run in runs}
    order = [line.split()[0] for line in printed.splitlines() if line.split() and line.split()[0] in errors]
    assert order == sorted(errors, key=errors.__getitem__)
    assert all(list(run["by_token"]) == ["example", "error", "ridge"] for run in runs)
    plots = {"error-by-pairs.png", "error-by-state-size.png", "loss-curves.png", "by-token.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == plots


def test_a_vocabulary_that_does_not_hold_the_group_is_one_line(tmp_path, capsys):
    assert main(["recall", "--task", "s5", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "vocab_size must be at least 120, the states of task 's5', got 64" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
