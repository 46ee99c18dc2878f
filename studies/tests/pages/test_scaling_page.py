"""The tables of trainings on several GPUs in docs/train.md show what was measured beside one GPU of the same kind and model."""

from __future__ import annotations

from pathlib import Path

from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.scaling import make_training_rows
from fastweights_studies.pages import scaling
from fastweights_studies.record import Row, write_rows

GIB = 2**30


def training_rows(device: str, speed: float) -> list[Row]:
    rows: list[Row] = []

    def add(mixer: str | None, gpus: int, way: str | None, speed: float, length: int = 2048, batch: int = 8) -> None:
        values = {"step_ms": 1e5 / speed, "tokens_per_second": speed, "memory_bytes": 3 * GIB}
        values |= {"predicted_memory_bytes": 4 * GIB} if way == "DDP" else {}
        rows.extend(make_training_rows("gdn-340m", mixer, gpus, way, batch, length, values, describe(device)))

    add(None, 1, None, speed)
    add("gka", 1, None, speed / 2)
    add(None, 4, "DDP", 3.8 * speed)
    add("gka", 4, "DDP", 1.8 * speed)
    add(None, 1, None, speed / 10, 4096, 1)
    add(None, 4, "context-state", 0.34 * speed, 4096, 1)
    return rows


def test_what_is_measured_is_shown(tmp_path: Path) -> None:
    for device, speed in (("NVIDIA A100", 100.0), ("NVIDIA B200", 200.0)):
        write_rows(tmp_path / f"scaling-{device[-4:]}.json", training_rows(device, speed))
    today = describe().date[:10]
    copied = scaling.data_parallel(tmp_path).splitlines()
    assert f"| 4 A100 | `gdn-340m` | DDP | 263 | 1000 | .95 | 3.0 | 4.0 | {today} |" in copied
    assert f"| 4 A100 | `gdn-340m` with `gka` | DDP | 556 | 2000 | .90 | 3.0 | 4.0 | {today} |" in copied
    assert f"| 4 B200 | `gdn-340m` | DDP | 132 | 500 | .95 | 3.0 | 4.0 | {today} |" in copied
    assert len([line for line in copied if line.startswith("| ")]) == 2 + 4
    divided = scaling.context_parallel(tmp_path).splitlines()
    assert f"| 4 A100 | `gdn-340m` | 16,384 | states passed on | 2,941 | .85 | 3.0 |  | {today} |" in divided
    assert len([line for line in divided if line.startswith("| ")]) == 2 + 2
