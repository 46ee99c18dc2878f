"""Claims about speed: read from the benchmarks' files, never made up where these are missing."""

import json
import shutil

import pytest
from fastweights_studies import places
from fastweights_studies.claims import Conditions, find_claim, load_record, run_claim

RESULTS = places.RESULTS
ORIGIN = {
    "device": "NVIDIA Test",
    "torch": "2.11",
    "time": "2026-01-02T00:00:00",
    "commit": "01234567 with uncommitted changes",
}


def record(name, folder):
    return run_claim(find_claim(name), Conditions(seeds=(0,), measurements=folder))


@pytest.mark.parametrize("name", ["S1", "S2", "S4", "S5", "S6"])
def test_a_missing_file_is_said(name, tmp_path):
    found = record(name, tmp_path)
    assert found.status == "not testable here" and "needs" in found.reason and not found.rows


def test_kernels_need_a_gpu():
    found = record("S3", RESULTS)
    assert found.status == "not testable here" and "--device cuda" in found.reason


@pytest.mark.parametrize("name", ["S1", "S2", "S5", "S6"])
def test_the_verdict_is_that_of_the_files(name):
    found, committed = record(name, RESULTS), load_record(RESULTS / "claims" / f"{name}.json")
    remedy = f"run fastweights reproduce {name} --output studies/results/claims, then python -m fastweights_studies.pages.claims"
    assert (found.status, found.rows) == (committed.status, committed.rows), remedy
    assert any("H200" in source for source in found.sources())


def test_a_dear_write_key_is_noticed(tmp_path):
    shutil.copy(RESULTS / "kernels-nvidia-h200.json", tmp_path)
    path = tmp_path / "kernels-nvidia-h200.json"
    content = json.loads(path.read_text())
    content["rows"]["gdn-write 4,2048,8,128,128"]["forward"]["graph"]["ours"][0] *= 1.1
    path.write_text(json.dumps(content))
    assert record("S1", RESULTS).status == "holds" and record("S1", tmp_path).status == "does not hold"


@pytest.mark.parametrize(
    ("times", "loop", "status"),
    [((2.0, 1.2, 0.9), 30.0, "holds"), ((2.0, 1.2, 0.9), 10.0, "does not hold"), ((0.9, 0.5, 0.2), 30.0, "does not hold"),
     ((4.0, 3.0, 2.0), 30.0, "does not hold"), ((4.0, 2.0, 1.1), 30.0, "not resolved")],
)  # fmt: skip
def test_where_softmax_attention_is_overtaken(times, loop, status, tmp_path):
    rows = {
        str(length): {"flash": {"median": 1.5}, "cudnn": {"median": 1.0}, "vla refreshed": {"median": x}}
        for length, x in zip((4096, 32768, 65536), times)
    }
    content = {**ORIGIN, "rows": rows, "loop": {"loop": {"median": loop}, "vla refreshed": {"median": 1.0}}}
    (tmp_path / "vla-nvidia-h200.json").write_text(json.dumps(content))
    found = record("S6", tmp_path)
    assert found.status == status and "inf" not in found.reason
    assert found.sources() == [
        "vla-nvidia-h200.json: NVIDIA Test, torch 2.11, 2026-01-02, commit 0123456 with uncommitted changes"
    ]


def change_steps(folder, name, file, comparison, factor):
    """The committed files, with the steps of one model times `factor`."""
    for path in (*RESULTS.glob("training-steps-*.json"), RESULTS / "kernels-nvidia-h200.json"):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    content = json.loads((folder / file).read_text())
    model = content["comparisons"][comparison]["models"][name]
    model["step, ms"] = [factor * x for x in model["step, ms"]]
    (folder / file).write_text(json.dumps(content))


def test_mesanet_decides_too(tmp_path):
    """PGDN's layers are over 20% faster than MesaNet's and PKDA's are not; a slower MesaNet, and presets that are slow."""
    mesa, pkda = (f"24 layers of {name}, compiled by blocks, replayed" for name in ("mesa", "pkda"))
    file = "training-steps-nvidia-h100-80gb-hbm3.json"
    parts = record("S2", RESULTS).reason.split("; ")
    models = json.loads((RESULTS / file).read_text())["comparisons"]
    times = {name: models[name]["models"][name]["step, ms"] for name in (mesa, pkda, mesa.replace("mesa", "pgdn"))}
    ours = [f"{sorted(times[mesa])[1] / sorted(x)[1]:.2f}" for x in times.values()][1:]
    assert f"Mesa / PKDA {ours[0]} (" in parts[2] and "not over 20% faster" in parts[2]
    assert f"Mesa / PGDN {ours[1]} (" in parts[1] and "), over 20% faster" in parts[1]
    assert record("S2", RESULTS).status == "holds weakly"
    change_steps(tmp_path, mesa, file, mesa, 1.3)
    assert record("S2", tmp_path).status == "holds"
    change_steps(tmp_path, "pkda-340m", "training-steps-nvidia-h200.json", "pkda-340m", 0.95)  # below 1.05
    assert record("S2", tmp_path).status == "holds weakly"
    change_steps(tmp_path, "pgdn-340m", "training-steps-nvidia-h200.json", "pgdn-340m", 1.2)
    assert record("S2", tmp_path).status == "does not hold"
    content = json.loads((tmp_path / file).read_text())
    del content["comparisons"][mesa]
    (tmp_path / file).write_text(json.dumps(content))
    assert record("S2", tmp_path).status == "not resolved"
