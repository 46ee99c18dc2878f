"""Bad commands of every kind: each ends soon with exit code 2 (1 for a failure at work), one line on stderr, nothing written."""

import io
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from fastweights.cli import main
from tests.evaluation.small import TEXT, save

SECONDS = 10
LONG = "n" * 300  # a name that no file can have
RUN = """
length = 32
batch_size = 2
max_steps = 2
evaluation_rows = 2
context_lengths = [16]
output = "trained"
cache = "cache"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
# Run files of recall by name: what they hold.
RECALL_FILES = {
    "unknown-key": ("step = 3", "'steps'"),
    "unknown-mixer": ('mixers = ["gnd"]', "'gdn'"),
    "misspelt-table": ('mixers = [{nam = "gdn"}]', "'name'"),
    "unknown-option": ('mixers = [{name = "gdn", options = {conv_siz = 2}}]', "'conv_size'"),
    "text-for-number": ('steps = "many"', "steps must be"),
    "many-digits": (f"steps = {'9' * 5000}", "not valid TOML"),
    "deep": (f"steps = {'[' * 5000}", "levels deep"),
    "part-above": ('[parts."../up"]', "'../up'"),
    "part-without-name": ('[parts.""]\nwidth = 16', "parts must"),
    "part-with-a-zero": ('[parts."a\\u0000"]\nwidth = 16', "parts must"),
    "part-with-a-bad-value": ("[parts.a]\n[parts.b]\nwidth = -1", "part b: width must be"),
    "output-with-a-zero": ('output = "a\\u0000"', "output must be"),
    "output-with-a-long-name": (f'output = "{LONG}"', "output must be the path of a folder of at most"),
    "triton": ('mixers = ["linear", {name = "gdn", options = {backend = "triton"}}]', "backend 'triton' needs"),
    "bad-stage": ("[[curriculum]]\npairs = -4\nlength = 32\nsteps = 3", "pairs of a stage"),
}
# Run files by name: what stands in RUN in place of what.
RUN_FILES = {
    "unknown-key": ("max_steps", "max_step", "max_steps"),
    "unknown-table": ("[corpus]", "[corpora]", "corpus"),
    "unknown-corpus-key": ("paths =", "path =", "paths"),
    "unknown-model-key": ("hidden_size", "hiddensize", "hidden_size"),
    "unknown-mixer": ("hidden_size", 'mixer = "gnd"\nhidden_size', "'gdn'"),
    "unknown-option": ("hidden_size", 'mixer = {name = "gdn", conv_sise = 2}\nhidden_size', "'conv_size'"),
    "triton": ("hidden_size", 'mixer = {name = "gdn", backend = "triton"}\nhidden_size', "backend 'triton' needs"),
    "unknown-preset": ("hidden_size", 'preset = "gdn-1c"\nhidden_size', "gdn-1b"),
    "text-for-number": ("max_steps = 2", 'max_steps = "2"', "max_steps must be"),
    "float-for-count": ("max_steps = 2", "max_steps = 2.5", "max_steps must be"),
    "flag-for-count": ("max_steps = 2", "max_steps = true", "max_steps must be"),
    "number-for-text": ('output = "trained"', "output = 3", "output must be"),
    "number-for-table": ('[corpus]\npaths = ["text.txt"]', "", "corpus"),
    "number-for-list": ("context_lengths = [16]", "context_lengths = 16", "context_lengths must be"),
    "texts-in-numbers": ("context_lengths = [16]", 'context_lengths = ["16"]', "context_lengths must be"),
    "path-as-number": ('paths = ["text.txt"]', "paths = [3]", "paths must be"),
    "no-paths": ('paths = ["text.txt"]', 'paths = ["nowhere.txt"]', "nowhere.txt does not exist"),
    "empty-text": ('paths = ["text.txt"]', 'paths = ["empty.txt"]', "empty"),
    "binary-text": ('paths = ["text.txt"]', 'paths = ["binary.txt"]', "binary"),
    "damaged-gzip": ('paths = ["text.txt"]', 'paths = ["damaged.txt.gz"]', "damaged.txt.gz"),
    "damaged-rows": ('paths = ["text.txt"]', 'paths = ["damaged.jsonl"]', "line 1"),
    "damaged-parquet": ('paths = ["text.txt"]', 'paths = ["damaged.parquet"]', "damaged.parquet"),
    "zero": ("length = 32", "length = 0", "length must be"),
    "one-token": ("length = 32", "length = 1", "length must be"),
    "negative": ("batch_size = 2", "batch_size = -2", "batch_size must be"),
    "nan": ("max_steps = 2", "max_steps = 2\nlearning_rate = nan", "learning_rate must be"),
    "infinite": ("max_steps = 2", "max_steps = 2\nlearning_rate = inf", "learning_rate must be"),
    "negative-rate": ("max_steps = 2", "max_steps = 2\nlearning_rate = -1.0", "learning_rate must be"),
    "fraction": ("max_steps = 2", "max_steps = 2\nwarmup_fraction = 1.5", "warmup_fraction must be"),
    "large-seed": ("max_steps = 2", f"max_steps = 2\nseed = {2**70}", "seed must be"),
    "huge-length": ("length = 32", "length = 100000000000", "length"),
    "huge-batch": ("batch_size = 2", "batch_size = 10000000000", "batch_size"),
    "huge-steps": ("max_steps = 2", "max_steps = 1000000000000000000000", "max_steps"),
    "huge-rows": ("evaluation_rows = 2", "evaluation_rows = 1000000000000000000000", "evaluation_rows"),
    "huge-layers": ("num_hidden_layers = 1", "num_hidden_layers = 1000000000", "num_hidden_layers"),
    "huge-width": ("hidden_size = 16", "hidden_size = 1000000000000", "hidden_size"),
    "huge-vocabulary": ("vocab_size = 300", "vocab_size = 10000000000000", "vocab_size"),
    "heads": ("num_heads = 2", "num_heads = 3", "num_heads"),
    "precision": ("max_steps = 2", 'max_steps = 2\nprecision = "int8"', "precision must be"),
    "twice": ("max_steps = 2", 'max_steps = 2\nmixers = ["gdn", "gdn"]', "mixers must be different"),
    "mixers-and-mixer": ("[model]", 'mixers = ["gdn"]\n[model]\nmixer = "gdn"', "mixer"),
    "path-and-size": ("[model]", '[model]\npath = "model"', "model must have nothing beside path"),
    "no-tokenizer": ("vocab_size = 300", 'path = "folder"', "folder"),
    "output-with-a-long-name": (
        'output = "trained"',
        f'output = "{LONG}"',
        "output must be the path of a folder of at most",
    ),
    "output-is-a-file": ('output = "trained"', 'output = "text.txt"', "output must be a folder"),
    "output-in-a-file": ('output = "trained"', 'output = "text.txt/x"', "output must be a folder"),
    "output-is-in-use": ('output = "trained"', 'output = "folder"', "cat.jpg"),
    "cache-is-a-file": ('cache = "cache"', 'cache = "text.txt"', "cache must be a folder"),
}
# Values of --import: what the file holds, and a word of the message.
IMPORTS = {
    "exits.py": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "exits-silently.py": ("raise SystemExit\n", "SystemExit"),
    "raises.py": ("1 / 0\n", "ZeroDivisionError"),
    "misspelt.py": ("def\n", "SyntaxError"),
    "binary.py": ("\0\n", "SyntaxError"),
    "nothing.py": ("x = 3\n", "registers no mixer"),
    "nothing_by_name": (None, "registers no mixer"),
    "folder.py": (None, "it is a folder"),
    "folder": (None, "it is a folder"),
    "folder/": (None, "it is a folder"),
    ".": (None, "it is a folder"),
    "no.such.module": (None, "there is no such module"),
}
WITH_IMPORT = (
    *("recall", "train run.toml", "convert model --to pgdn --output new", "evaluate model", "inspect model"),
    *("generate model Once", "leaderboard rules"),
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
    ("leaderboard rules tracking --mixers gdn:backend=triton", "backend 'triton' needs"),
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
    (f"inspect model --text text.txt --output {LONG}", "choose a shorter name"),
    (f"inspect {LONG}", "choose a shorter name"),
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
    ("inspect model --text empty.txt", "at least 2 tokens"),
    ("inspect model --output text.txt/new", "must be in a folder"),
    *[(f"recall recall-{name}.toml", word) for name, (_, word) in RECALL_FILES.items()],
    ("train deep.toml", "levels deep"),
    ("inspect nowhere", "nowhere"),
    ("inspect model --measures widow", "'window'"),
    ("inspect model --tokens 0", "tokens must be"),
    ("inspect model --tokens 99999999999999999999999", "tokens"),
    ("inspect model --every 0", "every must be"),
    ("inspect model --text nowhere.txt", "nowhere.txt"),
    ("inspect model --output text.txt", "text.txt"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    for name, content in {
        "empty.txt": b"",
        "binary.txt": b"\0\1\2" * 100,
        "damaged.txt.gz": b"\x1f\x8b nothing else",
        "damaged.jsonl": b'{"text": \n',
        "damaged.parquet": b"PAR1 nothing else",
        "run.toml": RUN.encode(),
        "empty.toml": b"",
        "latin.toml": "output = 'Grüße'".encode("latin-1"),
        "broken.toml": b"output = [\n",
        "broken.py": b"import nothing_of_this_name\n",
        "empty.py": b"",
    }.items():
        (folder / name).write_bytes(content)
    for name, (text, _) in RECALL_FILES.items():
        (folder / f"recall-{name}.toml").write_text(text)
    (folder / "deep.toml").write_text("length = " + "[" * 5000)
    shutil.copytree(folder / "model", folder / "trainings" / "gdn" / "model")
    for name, (before, after, _) in RUN_FILES.items():
        assert before in RUN
        text = RUN.replace(before, after)
        (folder / f"{name}.toml").write_text(f"corpus = 3\n{text}" if name == "number-for-table" else text)
    (folder / "folder").mkdir()
    (folder / "folder" / "cat.jpg").write_text("precious")
    (folder / "folder.toml").mkdir()
    for name, (text, _) in IMPORTS.items():
        if text is not None:
            (folder / name).write_text(text)
    (folder / "nothing_by_name.py").touch()
    (folder / "folder.py").mkdir()
    (folder / "loop.toml").symlink_to("loop.toml")
    return folder


def contents(folder: Path) -> dict[str, object]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (state.st_mode, state.st_size, state.st_mtime_ns) for path, state in found.items()}


def too_slow(*_: object) -> None:
    raise AssertionError(f"the command took more than {SECONDS} seconds")


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """Runs a command in `place`; its exit code and the one line that it prints."""

    def run(command: str) -> tuple[int, str]:
        monkeypatch.chdir(place)
        monkeypatch.setattr("sys.dont_write_bytecode", True)  # of modules that --import names
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Once \xff\xfe"), encoding="utf-8"))
        before = contents(place)
        old = signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(SECONDS)
        try:
            code = main(command.split(" "))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
        printed = capsys.readouterr()
        assert contents(place) == before, "the command wrote something"
        assert printed.out == "" and "Traceback" not in printed.err
        (line,) = printed.err.splitlines()
        return code, line

    return run


@pytest.mark.parametrize(("command", "word"), COMMANDS, ids=[command[:80] for command, _ in COMMANDS])
def test_a_bad_command_is_one_line(refused, command, word):
    code, line = refused(command)
    assert code == 2
    assert line.startswith("fastweights: error: ") and word in line
    assert "9223372036854775807" not in line and "[Errno" not in line
    for name in {word for word in re.split(r"[ =,]", command) if "." in word and word[0].isalpha()}:
        assert line.count(name) <= 1, "the file is named twice"


@pytest.mark.parametrize("command", ["recall", "train", "convert", "evaluate", "inspect", "generate", "mixers"])
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
