"""The models of transformers that are timed, as far as no GPU is needed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fastweights_studies.measure import transformers_models
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import replace_rows
from fastweights_studies.measure.transformers_models import BESIDE_FLA, BESIDE_PYTORCH, PHASES, Measured, build
from fastweights_studies.record import read_rows, select

from fastweights.integrations.transformers import FAMILIES
from tests.integrations import tiny_models


def tiny(name: str) -> Measured:
    config, _, sizes = tiny_models.MODELS[name]
    return Measured(config, {**tiny_models.SHARED, **sizes}, train=(2, 24), prompt=(1, 70))


@pytest.mark.parametrize("name", BESIDE_FLA)
def test_models_have_real_heads(name: str) -> None:
    assert name in FAMILIES
    model = build(BESIDE_FLA[name], "meta")
    layers = [layer for layer in model.modules() if hasattr(layer, "conv1d")]
    assert len(layers) == 3 and all(layer.conv1d.weight.shape[0] >= 64 * 128 for layer in layers)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert BESIDE_PYTORCH[name]._replace(train=(4, 4096), prompt=(1, 16384)) == BESIDE_FLA[name]


@pytest.mark.parametrize("title", PHASES)
@pytest.mark.parametrize("name", BESIDE_FLA)
def test_both_sides_take_turns(monkeypatch: pytest.MonkeyPatch, name: str, title: str) -> None:
    turns = []
    for side in ("accelerate", "restore"):
        call = getattr(transformers_models, side)
        monkeypatch.setattr(
            transformers_models, side, lambda *args, side=side, call=call: (turns.append(side), call(*args))
        )
    row = transformers_models.measure(tiny(name), title, rounds=2)
    assert turns == ["restore", "accelerate"] * 3 + ["restore"]
    assert all(len(times) == 2 and min(times) > 0 for times in row["turns_ms"].values())


@pytest.mark.slow
def test_a_row_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside PyTorch it does not find flash-linear-attention, which would end the process here."""
    (tmp_path / "fla.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options: dict[str, Any] = {"rounds": 1, "with_fla": False}
    row = transformers_models.measured_alone(tiny("kimi_linear"), "training_step", limit=300, **options)
    assert set(row["turns_ms"]) == {"transformers", "fastweights"}
    with pytest.raises(subprocess.TimeoutExpired):
        transformers_models.measured_alone(tiny("kimi_linear"), "training_step", limit=0.5, **options)
    with pytest.raises(subprocess.CalledProcessError):
        transformers_models.measured_alone(tiny("kimi_linear")._replace(config="None"), "prompt", limit=300, **options)


@pytest.mark.parametrize("fla", [False, True])
def test_a_row_that_fails_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fla: bool
) -> None:
    """The others are written; one of an earlier run stays. With flash-linear-attention there are rows beside it too."""

    compiled = []

    def measured_alone(
        sizes: Measured, title: str, rounds: int, *, with_fla: bool, limit: float, share: int | None = None
    ) -> dict[str, Any]:
        if share is not None:
            compiled.append((sizes.config, title, share))
            raise subprocess.CalledProcessError(1, "python")
        if title == "prompt" and not with_fla:
            raise subprocess.TimeoutExpired("python", limit)
        sides = {"transformers": 2.0, "fastweights": 1.0}
        return {"turns_ms": {side: [ms, ms] for side, ms in sides.items()}, "peak_bytes": sides}

    path, beside_fla = (tmp_path / f"transformers-models{ending}-a-gpu.json" for ending in ("", "-and-fla"))
    earlier = {"turns_ms": {"transformers": [9.0]}, "peak_bytes": {"transformers": None}}
    sizes = BESIDE_PYTORCH["kimi_linear"]
    replace_rows(path, transformers_models.make_phase_rows("kimi_linear", sizes, "prompt", False, earlier, describe()))

    monkeypatch.setattr(transformers_models, "is_installed", lambda: fla)
    monkeypatch.setattr(transformers_models, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(transformers_models, "measured_alone", measured_alone)
    monkeypatch.setattr(sys, "argv", ["transformers_models.py", "--limit", "7", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="2 rows failed: qwen3_next .*prompt .*beside PyTorch; kimi_linear "):
        transformers_models.main()
    assert "timed out after 7.0 seconds" in capsys.readouterr().out
    kimi = select(read_rows(path), measure="phase_ms", column={"model": "kimi_linear"})
    times = {
        phase: [row.value for row in kimi if row.column["phase"] == phase and not row.column["accelerated"]]
        for phase in PHASES
    }
    assert times == {"training_step": [2.0, 2.0], "prompt": [9.0], "decoding": [2.0, 2.0]}
    assert beside_fla.exists() == fla
    wanted = itertools.product([sizes.config for sizes in BESIDE_FLA.values()], PHASES[:2], range(4))
    assert sorted(compiled) == (sorted(wanted) if fla else [])
    if fla:
        prompts = select(read_rows(beside_fla), measure="phase_ms", column={"phase": "prompt", "fla": True})
        assert {(row.column["model"], row.column["length"]) for row in prompts} == {
            (name, 16384) for name in BESIDE_FLA
        }


def test_unknown_models_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers_models.py", "--only", "llama"])
    with pytest.raises(SystemExit):
        transformers_models.main()
    assert "--only must name models of qwen3_next, kimi_linear, got llama" in capsys.readouterr().err
