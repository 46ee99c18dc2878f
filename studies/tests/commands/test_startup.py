"""The help of the studies' commands needs no torch."""

import subprocess
import sys

HELP = """
import sys
from fastweights.cli import main
for name in ("inspect", "reproduce", "leaderboard"):
    assert main([name, "--help"]) == 0
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
"""


def test_help_needs_no_torch():
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
