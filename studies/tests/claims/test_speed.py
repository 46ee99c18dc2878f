"""Claims about speed: read from the result files of the measuring scripts, never made up where these are missing."""

import dataclasses
import shutil

import pytest
from fastweights_studies import places
from fastweights_studies.claims import Conditions, find_claim, load_record, run_claim
from fastweights_studies.measure.vla import make_vla_rows
from fastweights_studies.record import Origin, read_rows, select, write_rows

RESULTS = places.RESULTS
KERNELS, VLA = "kernels-nvidia-h200.json", "vla-nvidia-h200.json"
H100, H200 = "training-steps-nvidia-h100-80gb-hbm3.json", "training-steps-nvidia-h200.json"
ORIGIN = Origin(
    device="NVIDIA Test", versions={"torch": "2.11"}, commit="01234567", date="2026-01-02T00:00:00", changed=True
)


def record(name, folder):
    return run_claim(find_claim(name), Conditions(seeds=(0,), measurements=folder))


@pytest.mark.parametrize("name", ["S1", "S2", "S4", "S5", "S6"])
def test_a_missing_file_is_said(name, tmp_path):
    found = record(name, tmp_path)
    assert found.status == "not testable here" and "needs" in found.reason and not found.rows


def test_kernels_need_a_gpu():
    found = record("S3", RESULTS)
    assert found.status == "not testable here" and "--device cuda" in found.reason


@pytest.mark.parametrize("name", ["S1", "S2", "S4", "S5", "S6"])
def test_the_verdict_is_that_of_the_files(name):
    found, committed = record(name, RESULTS), load_record(RESULTS / "claims" / f"{name}.json")
    remedy = f"run fastweights reproduce {name} --output studies/results/claims, then python -m fastweights_studies.pages.claims"
    assert (found.status, found.rows) == (committed.status, committed.rows), remedy
    assert any("H200" in source for source in found.sources())


def change(folder, name, factor, *, drop=False, run=None, **fields):
    """The committed files, with the times of some rows of one of them times `factor`, or without these rows."""
    for path in (RESULTS / H100, RESULTS / H200, RESULTS / KERNELS):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    rows = read_rows(folder / name)
    changed = [row for row in select(rows, **fields) if run is None or run.items() <= row.run.items()]
    assert changed
    kept = [row for row in rows if row not in changed] if drop else [
        dataclasses.replace(row, value=factor * row.value) if row in changed else row for row in rows
    ]  # fmt: skip
    write_rows(folder / name, kept)


def test_a_dear_write_key_is_noticed(tmp_path):
    size = {"op": "gdn-write", "B": 4, "T": 2048, "peer": None, "replayed": True}
    change(tmp_path, KERNELS, 1.1, measure="forward_ms", column=size)
    assert record("S1", RESULTS).status == "holds" and record("S1", tmp_path).status == "does not hold"


@pytest.mark.parametrize(
    ("times", "loop", "status"),
    [((2.0, 1.2, 0.9), 30.0, "holds"), ((2.0, 1.2, 0.9), 10.0, "does not hold"), ((0.9, 0.5, 0.2), 30.0, "does not hold"),
     ((4.0, 3.0, 2.0), 30.0, "does not hold"), ((4.0, 2.0, 1.1), 30.0, "not resolved")],
)  # fmt: skip
def test_where_softmax_attention_is_overtaken(times, loop, status, tmp_path):
    rows = [
        row
        for length, ms in zip((4096, 32768, 65536), times)
        for row in make_vla_rows(length, {"flash": 1.5, "cudnn": 1.0, "vla_refreshed": ms}, ORIGIN)
    ]
    write_rows(tmp_path / VLA, rows + make_vla_rows(4096, {"loop": loop, "vla_refreshed": 1.0}, ORIGIN, loop=True))
    found = record("S6", tmp_path)
    # The paper has other heads, so the rule's outcome is not the status.
    assert found.status == "not resolved" and "inf" not in found.reason
    assert (f"outcome of the rule: {status}" in found.reason) == (status != "not resolved")
    assert found.sources() == [f"{VLA}: NVIDIA Test, torch 2.11, 2026-01-02, commit 0123456 with uncommitted changes"]


@pytest.mark.slow
def test_mesanet_decides_too(tmp_path):
    """PGDN's layers are over 20% faster than MesaNet's and PKDA's are not; a slower MesaNet, and presets that are slow."""
    parts = record("S2", RESULTS).reason.split("; ")
    steps = select(read_rows(RESULTS / H100), measure="step_ms", options={}, column={"compiled": "blocks"})
    mesa, pkda, pgdn = (
        next(row.value for row in select(steps, mixer=name) if row.run["side"] == "model") for name in ("mesa", "pkda", "pgdn")
    )  # fmt: skip
    ours = [f"{mesa / other:.2f}" for other in (pkda, pgdn)]
    assert f"Mesa / PKDA {ours[0]} (" in parts[2] and "not over 20% faster" in parts[2]
    assert f"Mesa / PGDN {ours[1]} (" in parts[1] and "), over 20% faster" in parts[1]
    assert record("S2", RESULTS).status == "holds weakly"
    slower = {"measure": "step_ms", "mixer": "mesa", "run": {"side": "model"}}
    change(tmp_path, H100, 1.3, **slower)
    assert record("S2", tmp_path).status == "holds"
    change(tmp_path, H200, 0.95, measure="step_ms", column={"preset": "pkda-340m"})  # below 1.05
    assert record("S2", tmp_path).status == "holds weakly"
    change(tmp_path, H200, 1.2, measure="step_ms", column={"preset": "pgdn-340m"})
    assert record("S2", tmp_path).status == "does not hold"
    change(tmp_path, H100, 1.0, drop=True, **slower)
    assert record("S2", tmp_path).status == "not resolved"
