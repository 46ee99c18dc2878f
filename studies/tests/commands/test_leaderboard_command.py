"""`fastweights leaderboard`: the list, a part, a mixer of one's own, what is read, bad commands."""

import json
import re
import shlex
import sys
from dataclasses import replace

import pytest
from fastweights_studies import places
from fastweights_studies.leaderboard import PARTS, SIZES
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.record import read_rows, select, write_rows

from fastweights.cli import main
from fastweights.files import file_name
from fastweights.layers import MIXERS, registry
from studies.tests.leaderboard.toy import S3, TOY, task, train_here

MEASURED = places.RESULTS
MINE = """
from fastweights.layers import MemoryLayer, register_mixer
from fastweights.ops import linear_attention


@register_mixer("board-mine", summary="values within [-1, 1]", equation="S + k clip(v)^T", source="a test", state="H K V")
class Mine(MemoryLayer):
    def rule(self, x, q, k, v, run):
        return run(linear_attention, q, k, v.clamp(-1, 1), state=("S",))

    def state_size(self, length=1):
        return self.heads.value_heads * self.heads.key * self.heads.value
"""


def run(capsys, *arguments):
    code = main(["leaderboard", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_list_has_every_part_with_its_cost_and_what_was_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, printed, error = run(capsys, "--list", "--output", tmp_path, "--measurements", MEASURED, "--size", "full")
    rows = {line.split()[0]: " ".join(line.split()) for line in printed.splitlines() if line.strip()}
    assert code == 0 and error == "" and set(PARTS) <= set(rows)
    assert re.match(r"mqar 33 of \d+ \d+ minutes of one GPU", rows["mqar"])  # those that the library comes with
    assert re.match(
        r"decoding-speed ([1-9]\d) of \d+ read from the files of python -m \S+decode_table", rows["decoding-speed"]
    )
    found, every = map(int, re.match(r"decoding-speed (\d+) of (\d+)", rows["decoding-speed"]).groups())
    assert found <= every  # softmax at several contexts is one mixer
    printed = run(capsys, "--list", "--output", MEASURED / "leaderboard", "--measurements", MEASURED)[1]
    assert "24 of 24" in next(line for line in printed.splitlines() if line.startswith("rules"))


def test_the_list_fits_a_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    printed = run(capsys, "--list", "--output", tmp_path)[1]
    assert "…" not in printed and all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mixer_of_ones_own_joins_by_its_name(capsys, tmp_path, monkeypatch, processes):
    """Worker processes import it too. Results that are there stay."""
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    if not processes:
        train_here(monkeypatch)
    tracking = task({"task": "s3", "pairs": 4}, rates=(1e-2,), seeds=(0,))
    monkeypatch.setitem(SIZES, "small", replace(TOY, tasks={"tracking": tracking}))
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    options = ("tracking", "--output", tmp_path / "out", "--workers", 1)
    code, printed, _ = run(capsys, *options, "--mixers", "linear,board-mine", "--import", file)
    assert code == 0 and "board-mine" in printed and "tracking-small.json" in printed.replace("\n", "")
    assert {row.mixer for row in read_rows(tmp_path / "out" / "tracking-small.json")} == {"linear", "board-mine"}
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("runs/*.json")}
    assert run(capsys, *options, "--mixers", "board-mine")[0] == 0  # nothing is trained again
    assert (
        times == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("runs/*.json")} and len(times) == 2
    )


def test_results_of_the_library_stand_beside_those_of_the_output_folder(capsys, tmp_path, monkeypatch):
    """Where setting and size are the same, for mixers without results of one's own. They are not copied."""
    monkeypatch.setenv("COLUMNS", "120")
    train_here(monkeypatch)
    toy = replace(TOY, tasks={**TOY.tasks, "tracking": task({"task": "s3", "pairs": 4}, rates=(1e-2,))})
    monkeypatch.setitem(SIZES, "small", toy)
    library, output = tmp_path / "library", tmp_path / "out"
    assert run(capsys, "tracking", "--output", library, "--workers", 1, "--mixers", "gdn,linear")[0] == 0
    path = library / "tracking-small.json"
    values = {0: 0.75, 1: 0.76}
    rows = [
        replace(
            row, value=values[row.seed], run={**row.run, "chance": 0.1}, origin=replace(row.origin, device="A machine")
        )
        for row in read_rows(path)
    ]
    write_rows(path, rows)
    monkeypatch.setattr("fastweights_studies.leaderboard.board.COMMITTED", library)
    listed = run(capsys, "--list", "--output", output)[1]
    assert "2 of 36" in next(line for line in listed.splitlines() if line.startswith("tracking "))
    code, printed, _ = run(capsys, "tracking", "--output", output, "--workers", 1, "--mixers", "linear")
    cells = {line.split()[0]: line for line in printed.splitlines() if line.split()}
    assert (
        code == 0
        and "0.755 ±0.005 (1=)" in cells["gdn"]
        and "(1=)" in cells["linear"]
        and "0.755" not in cells["linear"]
    )
    assert (
        f"The results of one mixer come with the library, measured on A machine; only the others are in {output}."
        in (" ".join(printed.splitlines()))
    )
    assert {row.mixer for row in read_rows(output / "tracking-small.json")} == {"linear"}
    write_rows(path, [replace(row, run={**row.run, "learning_rates": [1e-3]}) for row in rows])
    assert "come with the library" not in run(capsys, "tracking", "--output", output, "--mixers", "linear")[1]


@pytest.mark.parametrize("part", ["decoding-speed", "training-speed", "memory"])
def test_speed_and_memory_are_read_from_what_was_measured(capsys, tmp_path, part, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, printed, error = run(capsys, part, "--measurements", MEASURED, "--output", tmp_path / "new")
    assert code == 0 and error == "" and not (tmp_path / "new").exists()
    cells = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    steps = read_rows(MEASURED / "training-steps-nvidia-h100-80gb-hbm3.json")
    table = select(read_rows(MEASURED / "decode-table-nvidia-h200.json"), mixer="kda")
    (step,) = select(
        steps, mixer="palimpsa-d", measure="tokens_per_second", column={"compiled": "blocks", "replayed": True}
    )
    (speed,) = select(table, measure="tokens_per_second", column={"batch": 64})
    (state,) = select(table, measure="state_bytes", column={"batch": 1})
    expected = {
        "decoding-speed": f"{speed.value:,.0f}",
        "training-speed": f"{step.value:,.0f}",
        "memory": f"{state.value / 1e6:.2f}",
    }[part]
    assert expected in cells["palimpsa-d" if part == "training-speed" else "kda"]
    assert "not run" in printed
    if part != "training-speed":  # softmax is there at several contexts, so it is not missing
        assert [line for line in printed.splitlines() if line.startswith("softmax ")] == [
            line for line in printed.splitlines() if line.startswith("softmax at ")
        ]


def test_what_was_not_measured_is_named_with_its_commands(capsys, tmp_path, monkeypatch):
    """The benchmarks take the commands as they are printed, and their rows are read."""
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    monkeypatch.syspath_prepend(str(MEASURED.parent))
    from fastweights_studies.measure import decode_table, training_steps

    file, folder = tmp_path / "mine.py", tmp_path / "measured"
    file.write_text(MINE)
    options = ("--mixers", "board-mine", "--import", file, "--measurements", folder)
    code, printed, _ = run(capsys, "training-speed", "decoding-speed", "memory", *options)
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  python ")]
    assert code == 0 and [command[2].rpartition(".")[2] for command in commands] == 2 * [
        "training_steps",
        "decode_table",
    ]

    model = {"step_ms": Milliseconds(100.0, 99.0, 101.0), "tokens_per_second": 1.0, "activations_bytes": 2**30}
    step = {"tokens_per_second": 7777.0, "state_bytes": 5e6, "step_ms": 1.0}
    for module in (decode_table, training_steps):
        monkeypatch.setattr(module, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(decode_table, "built", lambda mixer: mixer)
    monkeypatch.setattr(decode_table, "measure", lambda model, batch, context: step)
    monkeypatch.setattr(training_steps.tuning, "keep_choices", lambda: None)
    monkeypatch.setattr(
        training_steps,
        "compare",
        lambda one, length, rounds, kept: [(side, {**model, "first_step_s": 1.0}) for side in (one.base, one.model)],
    )
    for module, (_, _, script, *arguments) in zip((training_steps, decode_table), commands):
        del registry._REGISTRY.specs["board-mine"]  # as in a process that has not imported it
        for name in [name for name in sys.modules if name.startswith("fastweights_import_mine")]:
            del sys.modules[name]
        monkeypatch.setattr("sys.argv", [script, *arguments])
        module.main()
        assert "board-mine" in MIXERS
    capsys.readouterr()
    for part, cell in {"training-speed": "163,840", "decoding-speed": "7,777", "memory": "5.000"}.items():
        code, printed, _ = run(capsys, part, *options)
        line = next(line for line in printed.splitlines() if line.startswith("board-mine"))
        assert cell in line and "not run" not in line and "python" not in printed


def test_nothing_measured_is_not_run(capsys, tmp_path):
    code, printed, _ = run(capsys, "decoding-speed", "--measurements", tmp_path, "--mixers", "gdn,kda")
    assert code == 0 and printed.count("not run") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name at least one part"),
        (("mqr",), "part must be one of"),
        (("mqar", "--size", "huge"), "--size must be one of"),
        (("mqar", "--mixers", "gdm"), "did you mean 'gdn'"),
        (("mqar", "--mixers", "gdn,gdn"), "'gdn' is there twice"),
        (("mqar", "--device", "tpu"), "device must be"),
        (("mqar", "--seeds", "x"), "--seeds takes whole numbers"),
        (("mqar", "--seeds", "1,1"), "--seeds must differ"),
        (("mqar", "--workers", "0"), "--workers must be"),
        (("rules", "--mixers", "softmax"), "keeps every token"),
    ],
)
def test_bad_commands_end_with_one_line(capsys, tmp_path, arguments, message):
    code, printed, error = run(capsys, *arguments, "--output", tmp_path / "new")
    assert code == 2 and message in error and error.count("\n") == 1 and printed == ""
    assert not (tmp_path / "new").exists()


def test_help_names_the_parts():
    from importlib import import_module

    assert ", ".join(PARTS) == import_module("fastweights_studies.commands.leaderboard").PARTS


def test_overwrite_measures_the_mixers_that_are_named_anew(capsys, tmp_path, monkeypatch):
    """Rows and trainings of others stay, and so do other files."""
    train_here(monkeypatch)
    tracking = task({"task": "s3", "pairs": 4}, rates=(1e-2,), seeds=(0,))
    monkeypatch.setitem(SIZES, "small", replace(TOY, tasks={"tracking": tracking}))
    board, trained = tmp_path / "tracking-small.json", tmp_path / "trained" / "tracking-small" / file_name(S3)
    options = ("tracking", "--output", tmp_path, "--workers", 1)
    assert run(capsys, *options, "--mixers", "linear,gla")[0] == 0
    (trained / "gla" / "notes.txt").write_text("mine")
    (trained / "gla" / "seed0" / "runs" / "notes.json").write_text("mine")
    before, there = read_rows(board), inodes(trained)
    code, _, error = run(capsys, *options, "--mixers", "gla", "--overwrite")
    assert code == 0, error
    after = read_rows(board)
    assert select(after, mixer="linear") == select(before, mixer="linear") and len(after) == len(before) == 2
    new = {path for path, number in inodes(trained).items() if number != there.get(path)}
    assert new and all("/gla/" in str(path) and "notes" not in path.name for path in new), new
    board.write_text(board.read_text().replace('"steps"', '"step"'))
    code, _, error = run(capsys, *options, "--mixers", "linear")
    assert code == 2 and "measured at another setting" in error and "--overwrite" in error
    assert run(capsys, *options, "--mixers", "linear", "--overwrite")[0] == 0
    assert {row.mixer for row in read_rows(board)} == {"linear"}


def test_a_board_of_an_earlier_version_is_refused(capsys, tmp_path, monkeypatch):
    """Once it is deleted, the same command writes it again from the trainings that are there."""
    trained = train_here(monkeypatch)
    tracking = task({"task": "s3", "pairs": 4}, rates=(1e-2,), seeds=(0,))
    monkeypatch.setitem(SIZES, "small", replace(TOY, tasks={"tracking": tracking}))
    options = ("tracking", "--output", tmp_path, "--workers", 1, "--mixers", "linear")
    assert run(capsys, *options)[0] == 0
    board = tmp_path / "tracking-small.json"
    rows = read_rows(board)
    old = {"format": 1, "part": "tracking", "size": "small", "setting": {"shared": {}}, "rows": {"s3, linear": {}}}
    board.write_text(json.dumps(old))
    code, printed, error = run(capsys, *options)
    assert code == 2 and printed == "" and error.count("\n") == 1 and "of an earlier version; delete that file" in error
    assert json.loads(board.read_bytes()) == old
    trained.clear()
    board.unlink()
    assert run(capsys, *options)[0] == 0 and trained == []
    assert [(row.mixer, row.seed, row.value) for row in read_rows(board)] == [
        (row.mixer, row.seed, row.value) for row in rows
    ]
    board.write_text(json.dumps(old))
    assert run(capsys, *options, "--overwrite")[0] == 0 and len(trained) == 1


def inodes(folder):
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*.json")}
