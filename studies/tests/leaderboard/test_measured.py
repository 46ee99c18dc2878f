"""Speed and memory are read from the rows of measuring scripts."""

from __future__ import annotations

from dataclasses import replace

from fastweights_studies.leaderboard import PARTS
from fastweights_studies.record import Row, select, write_rows

from .toy import NOWHERE

STEP = Row(
    task="training_step", measure="step_ms", unit="ms", mixer="gdn", value=100.0, origin=NOWHERE,
    column={"layers": 24, "batch": 8, "length": 2048, "compiled": "blocks", "replayed": True, "library": "fastweights"},
)  # fmt: skip
DECODED = Row(
    task="decode_table", measure="tokens_per_second", unit="tokens/s", mixer="gdn", value=50.0, origin=NOWHERE,
    column={"batch": 1, "context": None, "layers": 24},
)  # fmt: skip


def shown(part, folder):
    """By column and line of the table, the numbers."""
    rows = PARTS[part].rows("full", folder, folder)
    return {(one.column, one.label + one.detail): one.values for one in PARTS[part].entries(rows)}


def test_a_training_step_is_the_newest_of_those_that_are_run_as_in_training(tmp_path):
    rows = [
        STEP,
        replace(STEP, value=200.0, origin=replace(NOWHERE, date="2026-01-03")),
        replace(STEP, value=300.0, column={**STEP.column, "compiled": None}),
        replace(
            STEP, value=400.0, column={**STEP.column, "library": "fla"}, origin=replace(NOWHERE, date="2026-01-04")
        ),
        replace(STEP, value=500.0, mixer="lattice", options={"objective": "encode"}),
        replace(STEP, value=600.0, mixer=None),
        replace(STEP, measure="activations_bytes", unit="bytes", value=3e9),
    ]
    write_rows(tmp_path / "training-steps-a.json", rows)
    assert shown("training-speed", tmp_path) == {("8 sequences of 2,048 tokens", "gdn"): (81920.0,)}
    assert shown("memory", tmp_path) == {("activations of 8 sequences of 2,048 tokens, MB", "gdn"): (3000.0,)}
    (row,) = PARTS["training-speed"].rows("full", tmp_path, tmp_path)
    assert row.run["file"] == "training-steps-a.json" and row.origin.date == "2026-01-03"


def test_growing_states_are_named_with_their_context(tmp_path):
    long = replace(DECODED, mixer="softmax", column={**DECODED.column, "context": 2048})
    rows = [DECODED, long, replace(DECODED, value=80.0, column={**DECODED.column, "batch": 8})]
    rows += [replace(row, measure="state_bytes", unit="bytes", value=2e6) for row in rows]
    write_rows(tmp_path / "decode-table-a.json", rows)
    write_rows(
        tmp_path / "training-steps-a.json",
        [replace(STEP, mixer=mixer, measure="activations_bytes", value=1e6) for mixer in ("gdn", "softmax")],
    )
    growing = "softmax at 2,048 tokens"
    assert shown("decoding-speed", tmp_path) == {
        ("1 sequence", "gdn"): (50.0,), ("1 sequence", growing): (50.0,), ("8 sequences", "gdn"): (80.0,),
    }  # fmt: skip
    state, activations = "state of a sequence, MB", "activations of 8 sequences of 2,048 tokens, MB"
    assert shown("memory", tmp_path) == {
        (state, "gdn"): (2.0,), (state, growing): (2.0,), (activations, "gdn"): (1.0,), (activations, growing): (1.0,),
    }  # fmt: skip
    missing = PARTS["decoding-speed"].how_to_measure(
        ["softmax", "kda"], select(rows, measure="state_bytes"), [], tmp_path
    )
    assert "--mixers kda " in missing
