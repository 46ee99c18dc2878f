"""`fastweights train`: options over a run file, results on stdout, errors in one line."""

import os
import subprocess
import sys

import pytest

from fastweights.cli import main
from fastweights.training.language import callbacks

from ..full_disk import largest_file, on_small_disk, small_disks_work

RUN = """
length = 32
batch_size = 2
max_steps = 4
log_every = 1
evaluation_rows = 4
context_lengths = [16, 64]
mixers = ["linear", "gdn"]
cache = "cache"
prompt = "A line"
output = "out"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("".join(f"A line of text, number {number}.\n" for number in range(600)))
    return tmp_path


def test_trains_stops_and_goes_on(folder, capsys):
    assert main(["train", "run.toml", "--max-steps", "5", "--output", "other", "--stop-at", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "stopped after step 2" in printed.err
    assert main(["train", "run.toml", "--max-steps", "5", "--output", "other"]) == 0
    printed = capsys.readouterr()
    assert "Held-out text after 320 tokens" in printed.out and "linear" in printed.out
    assert "gdn continues 'A line' with:\n" in printed.out
    assert "Models: other/linear/model, other/gdn/model" in printed.out
    assert "gdn: continues after step 2" in printed.err and "tokens/s" in printed.err and "GB" in printed.err
    assert (folder / "other" / "perplexity.png").exists() and not (folder / "out").exists()
    assert main(["train", "run.toml", "--max-steps", "6", "--output", "other"]) == 2
    refusal = capsys.readouterr().err
    assert "max_steps is 5 there and 6 here" in refusal and "path in [model]" in refusal and "schedule" in refusal
    assert main(["train", "run.toml", "--max-steps", "6", "--output", "other", "--overwrite", "--stop-at", "1"]) == 0


@pytest.mark.slow
def test_an_end_before_what_is_saved(folder, capsys):
    """Nothing is trained, and the step that is saved is named."""
    train = ["train", "run.toml"]
    assert main([*train, "--stop-at", "3"]) == 0
    assert main([*train, "--stop-at", "2"]) == 0
    printed = capsys.readouterr()
    assert (
        printed.out == "" and "linear: step 3 is saved already, so that nothing is trained up to step 2" in printed.err
    )
    assert printed.err.endswith("stopped after step 3; the same command without --stop-at continues from there\n")
    assert [path.name for path in (folder / "out").glob("*/checkpoints/*")] == ["checkpoint-3"] * 2
    assert main([*train, "--stop-at", "3"]) == 0 and not list(folder.rglob("result.json"))
    assert main([*train, "--stop-at", "4"]) == 0 and len(list(folder.rglob("result.json"))) == 2


def test_errors_are_one_line(folder, capsys, monkeypatch):
    def printed_line(code, *options):
        assert main(["train", *options]) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        error = printed.err.splitlines()[-1]
        assert error.startswith("fastweights: error: ") and "Traceback" not in printed.err
        return error

    assert "none.toml does not exist" in printed_line(2, "none.toml")
    assert "learning_rate must be positive" in printed_line(2, "run.toml", "--learning-rate", "-1")
    assert "No such option" in printed_line(2, "run.toml", "--max-step", "3")

    def fail(error):
        def on_step_end(*args, **kwargs):
            raise error

        monkeypatch.setattr(callbacks.StopAt, "on_step_end", on_step_end)

    fail(callbacks.NonFiniteLoss("the loss is nan at step 1"))
    assert "the loss is nan at step 1" in printed_line(1, "run.toml")
    fail(OSError(28, "No space left on device"))
    assert "No space left on device; the same command continues" in printed_line(1, "run.toml")
    fail(KeyboardInterrupt())
    anew = "stopped; the same command without --overwrite continues after the last checkpoint"
    assert anew in printed_line(130, "run.toml", "--overwrite")
    assert "stopped; the same command continues after the last checkpoint" in printed_line(130, "run.toml")


# Sizes of the largest file that can be written, and the first file that is larger.
LARGEST = {
    100: "the tokenizer could not be written to cache/tokenizer-",
    26_000: "the checkpoint of step 4 could not be written to out/linear/checkpoints",
}


@pytest.mark.parametrize("size", [100, pytest.param(26_000, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_the_same_command_continues(folder, capsys, size):
    with largest_file(size):
        assert main(["train", "run.toml"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"fastweights: error: {LARGEST[size]}")
    assert error.endswith("; the same command continues after the last checkpoint")
    assert not [path for path in folder.rglob("*.partial") if path.is_dir()]
    if size == 26_000:  # at the other nothing is trained
        assert main(["train", "run.toml"]) == 0


@pytest.mark.slow
def test_a_full_disk_costs_no_result(folder, capsys):
    """There is space for all but the plots."""
    assert main(["train", "run.toml"]) == 0
    for plot in ("loss.png", "perplexity.png"):
        (folder / "out" / plot).unlink()
    capsys.readouterr()
    with largest_file(10_000):
        assert main(["train", "run.toml"]) == 1
    printed = capsys.readouterr()
    assert "Models: out/linear/model" in printed.out and "loss.png could not be written to out: File" in printed.err


@pytest.mark.slow
@pytest.mark.skipif(not small_disks_work(), reason="this machine lets no user mount a file system")
def test_a_file_system_that_is_full(folder):
    (folder / "out").mkdir()
    command = [sys.executable, "-m", "fastweights", "train", "run.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(on_small_disk("out", 200, command), capture_output=True, text=True, env=environment)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    error = ended.stderr.splitlines()[-1]
    assert error.startswith("fastweights: error: ") and "could not be written to out/" in error


@pytest.mark.parametrize(
    "was, becomes, message",
    [
        ("max_steps = 4", "max_steps = 'ten'", "max_steps must be a positive whole number, got 'ten'"),
        ("hidden_size = 16", "hidden_size = '16'", "hidden_size must be a positive whole number, got '16'"),
        (
            'mixers = ["linear", "gdn"]\n',
            "[model.mixer]\nname = 'gdn'\nexpand_v = '2'\n",
            "expand_v must be a number, got '2'",
        ),
        ("paths = ", "text_field = 3\npaths = ", "text_field must be a string, got 3"),
    ],
)
def test_wrong_kinds_in_a_run_file_are_one_line(folder, capsys, was, becomes, message):
    assert was in RUN
    text = RUN.replace(was, becomes)
    if "[model.mixer]" in becomes:  # a table in TOML ends where the next begins
        text = RUN.replace(was, "").replace("[tokenizer]", f"{becomes}[tokenizer]")
    (folder / "run.toml").write_text(text)
    assert main(["train", "run.toml"]) == 2
    printed = capsys.readouterr()
    error = printed.err.splitlines()[-1]
    assert error.startswith("fastweights: error: ") and message in error and "Traceback" not in printed.err
