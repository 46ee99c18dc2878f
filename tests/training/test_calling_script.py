"""Scripts that train on processes, with and without `if __name__ == "__main__":`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.analysis import load_results
from fastweights.training import calling_script

ROOT = Path(__file__).parents[2]
TASK = 'task="mqar", pairs=(2,), vocab_size=16, width=8, heads=2, layers=1, steps=4, batch_size=2, test_examples=4'
OWN_MIXER = """
from fastweights.layers import register_mixer
from fastweights.layers.delta_net import DeltaNet

@register_mixer("mine", summary="mine", equation="S", source="here", state="H K V")
class Mine(DeltaNet):
    pass
"""
CALL = f"""
from fastweights.training import RecallExperiment, run_recall

print("begins")
results = run_recall(
    RecallExperiment(mixers=("MIXER", "gdn"), learning_rates=(0.01,), {TASK}), "out", workers=2
)
print("ends", len(results))
"""
PLAIN = CALL.replace("MIXER", "linear")
OWN = OWN_MIXER + CALL.replace("MIXER", "mine")


def run(folder, script, name="script.py"):
    """name: of the file; None for standard input."""
    if name is not None:
        (folder / name).write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, name or "-"],
        input=None if name else script, cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def trained(folder):
    return [result.mixer for result in load_results(folder / "out" / "results.json")]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_without_the_line_trains_its_own_mixers(tmp_path, workers):
    """Workers run it up to the call, for the mixer that it registers there."""
    ended = run(tmp_path, OWN.replace("workers=2", f"workers={workers}"))
    assert ended.returncode == 0, ended.stderr
    assert trained(tmp_path) == ["mine", "gdn"] and ended.stdout.count("ends 2") == 1
    assert ended.stdout.count("begins") == 1 + workers


@pytest.mark.slow
def test_a_script_without_the_line_is_not_run_again(tmp_path):
    """Where it registers nothing: what it does before the call is done once."""
    ended = run(tmp_path, 'import shutil\nshutil.rmtree("out", ignore_errors=True)\n' + PLAIN)
    assert ended.returncode == 0, ended.stderr
    assert trained(tmp_path) == ["linear", "gdn"] and ended.stdout.split("\n") == ["begins", "ends 2", ""]


@pytest.mark.parametrize(
    ("script", "lacks"),
    [
        (PLAIN, True),
        ('# under if __name__ == "__main__": or not\nprint("__name__ != 1")\n' + PLAIN, True),
        ('if "__main__" == __name__:\n    pass\n', False),
        ('if __name__ in ("__main__",):\n    pass\n', False),
        ("\0", False),
    ],
)
def test_the_line_is_code(tmp_path, script, lacks):
    """Not a remark or a text that mentions it."""
    path = tmp_path / "script"
    path.write_text(script)
    assert calling_script._lacks_the_line(path) == lacks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script", None], ids=["no suffix", "standard input"])
def test_scripts_that_are_no_python_files(tmp_path, name):
    ended = run(tmp_path, PLAIN, name)
    assert ended.returncode == 0, ended.stderr
    assert trained(tmp_path) == ["linear", "gdn"] and ended.stdout.split("\n") == ["begins", "ends 2", ""]


@pytest.mark.slow
def test_a_script_without_suffix_trains_its_own_mixers(tmp_path):
    ended = run(tmp_path, OWN, "script")
    assert ended.returncode == 0, ended.stderr
    assert trained(tmp_path) == ["mine", "gdn"]


@pytest.mark.slow
def test_a_script_with_the_line_is_imported_by_workers(tmp_path):
    own = OWN_MIXER + '\nif __name__ == "__main__":\n' + "\n".join(f"    {line}" for line in CALL.splitlines())
    ended = run(tmp_path, own.replace("MIXER", "mine"))
    assert ended.returncode == 0, ended.stderr
    assert trained(tmp_path) == ["mine", "gdn"] and ended.stdout.count("begins") == 1


@pytest.mark.slow
def test_a_call_outside_of_the_line_is_told_to_go_there(tmp_path):
    ended = run(tmp_path, PLAIN + '\nif __name__ == "__main__":\n    pass\n')
    assert ended.returncode == 1
    first = next(line for line in ended.stderr.splitlines() if "Error: " in line)
    assert first.startswith("RuntimeError: run_recall must not be called") and 'if __name__ == "__main__":' in first


TOGETHER = """
from fastweights.training.language.together import train_together
from tests.training.language.small import small_run
from pathlib import Path
train_together([small_run(Path("work"), max_steps=1, model={"hidden_size": 16, "num_heads": 2, "mixer": "mine",
    "num_hidden_layers": 1})], 1, "cpu")
assert Path("work/out/result.json").exists()
"""


@pytest.mark.slow
def test_other_processes_of_a_script_without_the_line(tmp_path):
    ended = run(tmp_path, OWN_MIXER + TOGETHER + 'print("ends")\n')
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ends") == 1
