"""What is wrong with an option is said in one line on stderr, with exit code 2, before anything is made."""

import pytest

from fastweights import __version__
from fastweights.cli import main

SMALL = "--task mqar-shuffled --pairs 2 --vocab-size 16 --width 8 --heads 2 --steps 2 --batch-size 2 --test-examples 2"


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs `fastweights recall` with small settings and these options; the one line on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(options):
        before = sorted(tmp_path.rglob("*"))
        assert main(["recall", *SMALL.split(), *options.split()]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("fastweights: error: ") and printed.err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return printed.err

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mixers gnd", ["gnd", "did you mean 'gdn'", "longhorn"]),
        ("--mixers linear,", ["unknown mixer ''"]),
        ("--mixers gdn,gdn", ["mixers", "twice"]),
        ("--task mqr", ["mqr", "mqar"]),
        ("--pairs 0", ["pairs", "0"]),
        ("--pairs 2,x", ["--pairs", "whole numbers", "'x'"]),
        ("--pairs 1.5", ["--pairs", "'1.5'"]),
        ("--length 3", ["length must be at least"]),
        ("--vocab-size 3", ["vocab_size"]),
        ("--width 9", ["width must be a multiple of heads", "9", "2"]),
        ("--heads 0", ["heads"]),
        ("--layers -1", ["layers"]),
        ("--steps 0", ["steps"]),
        ("--steps ten", ["--steps", "integer"]),
        ("--batch-size 0", ["batch_size"]),
        ("--learning-rates 0", ["learning_rate"]),
        ("--learning-rates 0.1,nan", ["learning_rate", "nan"]),
        ("--seeds -1", ["seed"]),
        ("--test-examples 0", ["test_examples"]),
        ("--device tpu9", ["device"]),
        ("--workers 0", ["workers"]),
        ("--checkpoint-seconds -1", ["checkpoint_seconds"]),
        ("--mixers softmax --width 6", ["head_dim must be even"]),
        ("--stepz 3", ["--stepz", "--steps"]),
        ("--mixer gdn", ["--mixer"]),
        ("surplus", ["surplus"]),
        ("--steps", ["--steps"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options(refused, options, words):
    message = refused(options)
    for word in words:
        assert word in message


def test_an_output_that_is_a_file(refused, tmp_path):
    (tmp_path / "results").write_text("precious")
    assert "results is a file" in refused("--output results")
    assert "results is a file" in refused("--output results/below")
    assert (tmp_path / "results").read_text() == "precious"


def test_an_output_that_holds_other_things(refused, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("precious")
    assert "cat.jpg" in refused("--output photos")
    assert "cat.jpg" in refused("--output photos --overwrite")


def test_unknown_commands_are_refused(capsys):
    assert main(["recal"]) == 2
    assert "No such command 'recal'" in capsys.readouterr().err


def test_the_bare_command_shows_its_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert "Usage: fastweights" in printed.out and "recall" in printed.out and printed.err == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastweights {__version__}\n"


def test_list_is_that_of_the_mixers_command(capsys):
    assert main(["mixers"]) == 0
    listed = capsys.readouterr().out
    assert main(["recall", "--list"]) == 0
    assert capsys.readouterr().out == listed


def test_help_names_every_option_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recall", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in ("--mixers", "--pairs", "--learning-rates", "--seeds", "--device", "--output", "--workers", "--list"):
        assert option in printed
    assert "linear,gla,deltanet,gdn" in printed
