"""A folder with files of every bad kind, and what a bad command there must do: end soon with one line, and write nothing."""

import io
import re
import shutil
import signal
from pathlib import Path

import pytest

from fastweights.cli import main
from tests.evaluation.small import TEXT, save

from .run_file import RUN

__all__ = ["IMPORTS", "LONG", "RECALL_FILES", "RUN_FILES", "check_refusal", "place", "refused"]

SECONDS = 10
LONG = "n" * 300  # a name that no file can have
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
    "binary.py": ("\0\n", "null bytes"),  # a SyntaxError, before Python 3.11.4 a ValueError
    "nothing.py": ("x = 3\n", "registers no mixer"),
    "nothing_by_name": (None, "registers no mixer"),
    "folder.py": (None, "it is a folder"),
    "folder": (None, "it is a folder"),
    "folder/": (None, "it is a folder"),
    ".": (None, "it is a folder"),
    "no.such.module": (None, "there is no such module"),
}


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


def check_refusal(refused, command, word):
    code, line = refused(command)
    assert code == 2
    assert line.startswith("fastweights: error: ") and word in line
    assert "9223372036854775807" not in line and "[Errno" not in line
    for name in {word for word in re.split(r"[ =,]", command) if "." in word and word[0].isalpha()}:
        assert line.count(name) <= 1, "the file is named twice"
