"""The times of vLLM, as far as no GPU is needed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from fastweights_studies.measure import serving_bench, serving_floor, serving_models, serving_vllm
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import replace_rows
from fastweights_studies.record import read_rows, select


class Clock:
    """Of a server that takes 3 s to begin, 1 ms per token of a prompt, and 2 ms per step with all its sequences."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def write(self, count: int, prompt: int, tokens: int) -> None:
        self.now += 3.0 + 1e-3 * count * prompt + 2e-3 * tokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving_vllm, "time", clock)
    return clock


def test_a_step_is_free_of_the_prompt_and_the_start(clock: Clock) -> None:
    assert serving_vllm.step_ms(clock.write, 64, 100, 32, 3) == pytest.approx(2.0)


def test_steps_of_a_model_of_vllm_are_written(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_floor, "Server", lambda *_: clock)
    monkeypatch.setattr(serving_floor, "find_gpu", lambda: "NVIDIA Test")
    monkeypatch.setattr(sys, "argv", ["serving_floor", "--launched", "--batches", "1,64", "--results", str(tmp_path)])
    serving_floor.main()
    rows = select(read_rows(tmp_path / "serving-vllm-nvidia-test.json"), measure="step_ms")
    assert [row.value for row in rows] == [pytest.approx(2.0)] * 2
    assert [(row.column["batch"], row.column["layers"], row.column["launched"]) for row in rows] == [
        (1, 1, True),
        (64, 1, True),
    ]


def test_the_first_token_has_all(clock: Clock) -> None:
    assert serving_vllm.first_token_ms(clock.write, 500, 3) == pytest.approx(3502.0)


def test_tokens_behind_a_difference_do_not_count() -> None:
    """A model goes on from other tokens than it would have written."""
    assert serving_vllm.same_tokens([[1, 2, 3, 4], [5, 0, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]) == 5 / 8


def test_rows_keep_batches_prompts_and_mixers_apart(tmp_path: Path) -> None:
    file, origin = tmp_path / "rows.json", describe("a GPU")
    for mixer, batch, prompt, ms in (
        (None, 1, 64, 1.0),
        (None, 64, 64, 2.0),
        ("softmax", 1, 64, 3.0),
        (None, 1, 64, 4.0),
    ):
        replace_rows(file, serving_vllm.make_serving_rows("gdn-340m", mixer, batch, prompt, {"step_ms": ms}, origin))
    rows = select(read_rows(file), measure="step_ms")
    assert {(row.mixer, row.column["batch"]): row.value for row in rows} == {
        (None, 1): 4.0, (None, 64): 2.0, ("softmax", 1): 3.0,
    }  # fmt: skip
    assert all(row.unit == "ms" for row in rows)


def test_rows_say_how_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows of one form do not replace those of another."""
    plain = argparse.Namespace(launched=False, backend=None, layers=None)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    assert serving_vllm.describe_form(plain) == {}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    other = argparse.Namespace(launched=True, backend="TRITON_ATTN", layers=1)
    assert serving_vllm.describe_form(other) == {
        "launched": True, "backend": "TRITON_ATTN", "layers": 1, "engine": "in this process",
    }  # fmt: skip


def test_a_trace_says_how_long_the_gpu_waits() -> None:
    """Three steps of 100 us after a longer beginning: a product of 30 us, twice, and the arg max at the end."""
    events = [{"cat": "cpu_op", "name": "launch", "ts": 0, "dur": 900}]
    for step in range(4):
        kernels = [("product", 0, 30), ("product", 40, 30), ("ArgMaxOps", 80, 10)]
        events += [{"cat": "kernel", "name": name, "ts": 1000 + 100 * step + at, "dur": us} for name, at, us in kernels]
    first, *kernels = serving_vllm.describe_trace(events, 2).splitlines()
    assert first.strip() == "95.0 us per step, 70.0 of them in 3.0 kernels"
    assert [line.split() for line in kernels] == [
        ["60.0", "us", "2.0", "x", "product"],
        ["10.0", "us", "1.0", "x", "ArgMaxOps"],
    ]


def test_the_report_of_vllms_bench_becomes_rows() -> None:
    report: dict[str, float] = {theirs: 2.0 for theirs in serving_bench.KEPT.values()} | {"completed": 8}
    origin = describe("a GPU")
    rows = serving_bench.make_bench_rows("gdn-340m", "gdn", 16384, 128, 8, 45.0, False, report, origin)
    assert {row.measure: row.unit for row in rows} == {
        "tokens_per_second": "tokens/s",
        "written_tokens_per_second": "tokens/s",
        "first_token_ms": "ms",
        "step_ms": "ms",
        "bench_s": "s",
    }
    with pytest.raises(SystemExit, match="7 of 8"):
        serving_bench.make_bench_rows("gdn-340m", "gdn", 16384, 128, 8, 45.0, False, {**report, "completed": 7}, origin)


def test_rows_of_models_keep_kernels_apart_and_say_what_vllm_had(tmp_path: Path) -> None:
    file, origin = tmp_path / "rows.json", describe("a GPU")
    asked = serving_models.Asked([2048, 16384], [1], 64, 5, True, 0.5)
    for kernels, ms in ((serving_models.THEIRS, 3.0), (serving_models.OURS, 2.0)):
        found = serving_models.Found({"2048": ms, "16384": 8 * ms}, {"1": ms / 2}, [])
        replace_rows(file, serving_models.make_model_rows(found, kernels, asked, {}, origin))
    rows = read_rows(file)
    first = select(rows, measure="first_token_ms")
    assert {(row.column["kernels"], row.column["prompt"]): row.value for row in first} == {
        ("vLLM", 2048): 3.0, ("vLLM", 16384): 24.0, ("fastweights", 2048): 2.0, ("fastweights", 16384): 16.0,
    }  # fmt: skip
    assert {row.column["flashinfer"] for row in rows if row.column["kernels"] == "vLLM"} == {False}
    assert [row.value for row in select(rows, measure="step_ms")] == [1.5, 1.0]


def test_the_model_without_weights_is_one_that_vllm_reads(tmp_path: Path) -> None:
    serving_models.save_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3NextForCausalLM"] and config["mlp_only_layers"] == [0, 1, 2]
    assert config["num_experts"] == 8  # of the last layer: vLLM 0.24 builds no model without any
    assert config["linear_num_value_heads"] == 32 and config["max_position_embeddings"] > 65536
