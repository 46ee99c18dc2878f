"""Progress of the real commands: on a terminal of 80 columns, and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

RECALL = """recall --mixers gdn:conv_size=2,expand_v=2,linear --pairs 4 --vocab-size 16 --width 8 --heads 2 --batch-size 4
    --test-examples 4 --steps 300 --log-every 100 --learning-rates 0.01 --workers 1 --output out"""
TRAIN = """
length = 32
batch_size = 2
max_steps = 25
log_every = 10
evaluation_rows = 2
context_lengths = []
output = "trained"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
TIME_LEFT = r"(\d+|-):(\d\d|--):(\d\d|--) left"


@pytest.fixture(params=["recall", "train"])
def command(request, tmp_path):
    (tmp_path / "run.toml").write_text(TRAIN)
    (tmp_path / "text.txt").write_text("".join(f"A line of text, number {number}.\n" for number in range(600)))
    words = RECALL if request.param == "recall" else "train run.toml"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {
        "args": [sys.executable, "-m", "fastweights", *words.split()],
        "cwd": tmp_path,
        "env": {**environment, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    }


def on_a_terminal(command, columns):
    """All that the command shows on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    process = subprocess.Popen(**command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux says so when the last process has closed the terminal
        pass
    assert process.wait(60) == 0, shown
    return shown.decode()


@pytest.mark.slow
def test_bars_and_tables_fit_a_terminal_of_80_columns(command):
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", on_a_terminal(command, 80))
    lines = re.split(r"[\r\n]+", plain)
    bars = [line for line in lines if set(line) & set("━╸╺")]
    tables = [line for line in lines if "─" in line or line.startswith(("mixer ", "model "))]
    assert len(tables) >= 2 and all(len(line) <= 80 for line in bars + tables) and "…" not in "".join(tables)
    assert bars and all(sum(map(line.count, "━╸╺")) == 10 and re.search(f"{TIME_LEFT} *$", line) for line in bars)
    assert any(re.search(r"\d/(300|25), loss \d\.\d\d\d", line) for line in bars)


@pytest.mark.slow
def test_a_pipe_gets_a_line_every_log_every_steps(command):
    ended = subprocess.run(**command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    steps = re.findall(rf"step (\d+) of (\d+), loss \d\.\d\d\d.*{TIME_LEFT}\n", ended.stderr)
    wanted = ["100", "200"] * 2 if "recall" in command["args"] else ["10", "20"]
    assert [step for step, *_ in steps] == wanted, ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr and "…" not in ended.stdout
