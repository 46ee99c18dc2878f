"""Bad commands of every kind: each ends soon with exit code 2 (1 for a failure at work), one line on stderr, nothing written."""

import os

import pytest

from fastweights.cli import main

from . import refusing
from .refusing import IMPORTS, LONG, RECALL_FILES, RUN_FILES, check_refusal
from .run_file import RUN

place, refused = refusing.place, refusing.refused  # fixtures
WITH_IMPORT = (
    *("recall", "train run.toml", "convert model --to pgdn --output new", "evaluate model"),
    "generate model Once",
)
# (command, a word of the message)
COMMANDS = [
    *[
        (f"{command} --import {name}", IMPORTS[name][1])
        for command in WITH_IMPORT
        for name in ("exits.py", "nothing.py")
    ],
    *[(f"mixers --import {name}", word) for name, (_, word) in IMPORTS.items()],
    *[(f"train {name}.toml", word) for name, (_, _, word) in RUN_FILES.items()],
    ("recall --mixers gdn:backend=triton", "backend 'triton' needs"),
    ("recal", "recal"),
    ("--nonsense", "--nonsense"),
    ("train", "run_file"),
    ("train nowhere.toml", "nowhere.toml"),
    ("train folder", "folder"),
    ("train folder.toml", "folder.toml"),
    ("train loop.toml", "loop.toml"),
    (f"train {'x' * 300}.toml", "run file must be"),
    ("train text.txt", "text.txt"),
    ("train empty.toml --max-steps 0", "max_steps must be"),
    ("train latin.toml", "latin.toml"),
    ("train broken.toml", "broken.toml"),
    ("train broken.py", "broken.py"),
    ("train empty.py", "empty.py"),
    ("train run.toml --max-steps ten", "--max-steps"),
    ("train run.toml --learning-rate nan", "learning_rate must be"),
    ("train run.toml --stop-at 0", "stop_at must be"),
    ("train run.toml --stop-at -3", "stop_at must be"),
    ("train run.toml --output folder --overwrite", "cat.jpg"),
    ("train run.toml --import nowhere", "nowhere"),
    ("train run.toml --import nowhere.py", "nowhere.py"),
    ("train run.toml --import broken.py", "broken.py"),
    ("recall --mixers gnd", "'gdn'"),
    ("recall --mixers gdn:conv_sise=2", "'conv_size'"),
    ("recall --mixers gdn:conv_size=two", "conv_size must be"),
    ("recall --mixers gdn:expand_v=-1", "expand_v must be"),
    ("recall --mixers gdn:conv_size=2,gdn:conv_size=2", "another label"),
    ("recall --mixers gdn@a,pgdn@a", "another label"),
    ("recall --mixers gdn,conv_size=2", "gdn:conv_size=2"),
    ("recall --mixers gdn@", "label"),
    ("recall --mixers=", "unknown mixer ''"),
    ("recall --pairs=", "--pairs"),
    ("recall --pairs 0", "pairs must be"),
    ("recall --pairs 10000000000", "pairs"),
    ("recall --pairs 99999999999999999999999999", "pairs"),
    ("recall --task mqr", "'mqar'"),
    ("recall --length 99999999999999999999", "length"),
    ("recall --vocab-size 99999999999999999999", "vocab_size"),
    ("recall --vocab-size -1", "vocab_size"),
    ("recall --width 99999999999999999999 --heads 1", "width"),
    ("recall --heads 0", "heads must be"),
    ("recall --layers 1000000000", "layers"),
    ("recall --steps 1000000000000000", "steps"),
    ("recall --batch-size 10000000000", "batch_size"),
    ("recall --learning-rates 0.1,nan", "learning_rates must be"),
    ("recall --learning-rates 1e400", "learning_rates must be"),
    ("recall --learning-rates 0.1,0.1", "learning_rates must differ"),
    ("recall --seeds -1", "seeds must be"),
    (f"recall --seeds {2**64}", "seeds must be"),
    ("recall --seeds 1.5", "--seeds"),
    ("recall --test-examples 10000000000", "test_examples"),
    ("recall --workers 0", "workers must be"),
    ("recall --workers 10000000000", "workers"),
    ("recall --log-every 0", "log_every must be"),
    ("recall --checkpoint-seconds nan", "checkpoint_seconds must be"),
    ("recall --device tpu9", "device"),
    ("recall --device meta", "device"),
    ("recall --output folder", "cat.jpg"),
    ("recall --output folder --overwrite", "cat.jpg"),
    ("recall --output text.txt", "text.txt is a file"),
    (f"recall --output {LONG}", "output must be the path of a folder of at most"),
    (f"recall {LONG}.toml", "run file must be"),
    (f"evaluate model --output {LONG}", "choose a shorter name"),
    ("recall --output text.txt/below", "text.txt"),
    ("recall surplus", "surplus"),
    ("mixers gnd", "'gdn'"),
    ("mixers gdn pgdn", "pgdn"),
    ("mixers --import empty.txt", "empty.txt"),
    ("generate nowhere Once", "nowhere"),
    ("generate folder Once", "folder"),
    ("generate text.txt Once", "text.txt"),
    ("generate model", "PROMPT"),
    ("generate model Once --max-new-tokens 0", "max_new_tokens must be"),
    ("generate model Once --max-new-tokens 99999999999999999999999", "max_new_tokens"),
    ("generate model Once --temperature nan", "temperature must be"),
    ("generate model Once --temperature -1", "temperature must be"),
    ("generate model Once --top-p 1.5", "top_p must be"),
    ("generate model Once --seed -1", "seed must be"),
    (f"generate model Once --seed {2**70}", "seed must be"),
    ("generate model Once --device cuda:99", "device"),
    ("generate model Once --dtype int4", "dtype"),
    ("generate model -", "UTF-8"),  # standard input holds bytes that are not
    ("evaluate nowhere", "nowhere"),
    ("evaluate text.txt", "text.txt"),
    ("evaluate model --on perplexty", "'perplexity'"),
    ("evaluate model --on=", "measure"),
    ("evaluate model --lengths 0", "lengths must be"),
    ("evaluate model --lengths -5", "lengths must be"),
    ("evaluate model --on mqar --lengths 99999999999999999999999", "lengths"),
    ("evaluate model --on copy --pairs 0", "pairs must be"),
    ("evaluate model --texts 0", "texts must be"),
    ("evaluate model --block 0", "block must be"),
    ("evaluate model --block 99999999999999999999999", "block"),
    ("evaluate model --batch-size 99999999999999999999999", "batch_size"),
    ("evaluate model --depths 1.5", "depths must be"),
    ("evaluate model --depths nan", "depths must be"),
    ("evaluate model --on mqar --recall-examples 10000000000", "recall_examples"),
    ("evaluate model --text nowhere.txt", "nowhere.txt"),
    ("evaluate model --text empty.txt", "got 0"),
    ("evaluate model --text binary.txt", "binary"),
    ("evaluate model --output folder", "output must be a file"),
    ("evaluate model --output text.txt/x.json", "output must be"),
    ("evaluate model --limit 3", "--lm-eval"),
    ("convert model --to pgnd --output new", "'pgdn'"),
    ("convert model --to softmax --output new", "softmax"),
    ("convert nowhere --to pgdn --output new", "nowhere"),
    ("convert folder --to pgdn --output new", "folder"),
    ("convert text.txt --to pgdn --output new", "text.txt"),
    ("convert model --to pgdn --output folder", "folder"),
    ("convert model --to pgdn --output text.txt", "text.txt"),
    ("convert model --to pgdn --output text.txt/new", "text.txt"),
    ("convert model --to pgdn --output new --option bound", "NAME=VALUE"),
    ("convert model --to pgdn --output new --option bound=9", "bound must be"),
    ("convert model --to pgdn --output new --option bond=1", "'bound'"),
    ("convert model --to pgdn --output new --tokens 0", "tokens must be"),
    ("convert model --to pgdn --output new --tokens 99999999999999999999999", "tokens"),
    ("convert model --to pgdn --output new --seed -1", "seed must be"),
    (f"convert model --to pgdn --output new --seed {2**70}", "seed must be"),
    ("convert model --to pgdn --output new --peak nan", "peak must be"),
    ("convert model --to pgdn --output new --steps 0", "steps must be"),
    ("convert model --to pgdn", "--output"),
    ("convert model --to pgdn --output new --option bound=" + "9" * 5000, "bound must be"),
    ("convert model --to pgdn --output new --option bound=" + "[" * 5000, "bound must be"),
    ("convert trainings --to pgdn --output new", "trainings/gdn"),
    ("generate trainings Once", "trainings/gdn"),
    *[(f"recall recall-{name}.toml", word) for name, (_, word) in RECALL_FILES.items()],
    ("train deep.toml", "levels deep"),
]


@pytest.mark.parametrize(("command", "word"), COMMANDS, ids=[command[:80] for command, _ in COMMANDS])
def test_a_bad_command_is_one_line(refused, command, word):
    check_refusal(refused, command, word)


@pytest.mark.parametrize("command", ["recall", "train", "convert", "evaluate", "generate", "mixers"])
def test_help_at_80_columns_cuts_nothing(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([command, "--help"])
    printed = capsys.readouterr().out
    assert "Usage: fastweights " in printed and "…" not in printed


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(2, "No such file or directory", "x.txt"), "No such file or directory: x.txt"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("file x: [Errno 2] No such file"), "file x: No such file"),
        (OSError("disk of\nno kind"), "disk of no kind"),
    ],
)
def test_a_failure_at_work_names_its_file_once_and_no_number(refused, monkeypatch, error, line):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("fastweights.models.loading.load_language_model", fails)
    code = 1 if isinstance(error, OSError) else 2
    assert refused("generate model Once") == (code, f"fastweights: error: {line}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_files_without_permission(refused, place):
    hidden = place / "hidden.toml"
    hidden.write_text(RUN)
    hidden.chmod(0)
    assert refused("train hidden.toml") == (
        2,
        "fastweights: error: run file hidden.toml cannot be read: Permission denied",
    )
