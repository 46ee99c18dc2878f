"""docs/performance.md shows what it should of any results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.measure.fused import make_fused_rows
from fastweights_studies.measure.generate import make_generate_rows
from fastweights_studies.measure.gpu_tests import Counts, GpuTests, TestRun, write_tests
from fastweights_studies.measure.judge import records
from fastweights_studies.measure.judge.accuracy import Failure
from fastweights_studies.measure.judge.cases import Sizes
from fastweights_studies.measure.judge.checks import Combination
from fastweights_studies.measure.judge.timing import Ceilings
from fastweights_studies.measure.kernels import AGAINST
from fastweights_studies.measure.models import Model, make_step_rows
from fastweights_studies.measure.packed import make_packed_rows
from fastweights_studies.measure.repeatability import make_call_rows
from fastweights_studies.measure.rows import make_rows
from fastweights_studies.pages import performance, performance_kernels, rendering
from fastweights_studies.record import Origin, select, write_rows

ORIGIN = Origin(
    device="NVIDIA Test",
    versions={"torch": "2.11", "fla": "0.6.0", "files": "def"},
    commit="abc",
    date="2026-01-02T00:00:00+00:00",
)
SIZE, ONE = Sizes(4, 2048, 8, 128, 128), Sizes(1, 1, 1, 1, 1)


def part(ours: float, **others: float) -> dict[str, Any]:
    times = {"ours": ours, **others}
    return {"floor_ms": 0.5, "bound": "memory", "graph": times, "eager": times}


def test_page_of_made_up_results(tmp_path: Path) -> None:
    def timed(op: str, sizes: Sizes, **found: Any) -> list[Any]:
        return records.make_time_rows(op, sizes, "bfloat16", "auto", found, ORIGIN)

    times = {**part(1.0, fla=3.0), "peak_bytes": {"ours": 100 * 2**20, "fla": 200 * 2**20}}
    stages = {f"{cache}_stages_s": {} for cache in ("empty_cache", "warm_cache")}
    cold = {"empty_cache_s": 9.0, "warm_cache_s": 0.5, **stages}
    over = Failure("budget", "dg", "dg", 0.03, 0.02)
    kernels = [
        *records.make_ceiling_rows(Ceilings(4e12, 7e14, 1.0), ORIGIN),
        *timed(
            "gdn", SIZE, errors={"ours": {"o": 2e-3}, "fla": {"o": 4e-3}, "twin": {}},
            stateful_errors={"ours": {"S": 1e-3}, "twin": {"o": 3e-3}, "draws": 1}, forward=times, forward_backward=times,
        ),
        *records.make_cold_rows("gdn", SIZE, "bfloat16", "auto", cold, 1, ORIGIN),
        *timed("gdn", Sizes(64, 1, 16, 128, 128), in_place=True, decode=part(1.0, fla=1.5)),
        *timed("gdn-write", ONE, forward=part(1.02, tied=1.0), forward_backward=part(1.02, tied=1.0)),
        *timed("kda", SIZE, refused=[over]),
    ]  # fmt: skip
    write_rows(tmp_path / "kernels-nvidia-test.json", kernels)
    wrong = Failure("budget", "o", "o", 0.01, 0.005)
    checks = [
        row
        for sizes, failures in ((Sizes(1, 63, 8, 128, 128), [wrong]), (Sizes(1, 64, 8, 128, 128), []))
        for row in records.make_check_rows(
            "gdn", Combination(sizes), "auto", 0, {"errors": {"o": 1e-2}, "draws": 1, "failures": failures}, ORIGIN
        )
    ]
    write_rows(tmp_path / "kernel-checks-nvidia-test.json", checks)
    fused = {"errors": {}, "forward": part(0.1, torch=0.3)}
    write_rows(tmp_path / "fused-nvidia-test.json", make_fused_rows("norm", 4, 8, "bfloat16", fused, ORIGIN))
    other = dataclasses.replace(ORIGIN, commit="0123456789")
    compared = [
        row
        for which, origin, ms in (("after", ORIGIN, 1.0), ("before", other, 2.0))
        for row in make_rows(
            AGAINST,
            origin,
            {"device_ms": ms, "peak_bytes": 8 * 2**20},
            column={
                "op": "gdn", **records.sizes_column(ONE), "dtype": "bfloat16", "stage": "forward", "checkout": which
            },
        )
    ]  # fmt: skip
    write_rows(tmp_path / "kernels-against-nvidia-test.json", compared)
    packed = make_packed_rows("gdn", Sizes(1, 8192, 8, 128, 128), True, {False: 0.5, True: 0.55}, ORIGIN)
    write_rows(tmp_path / "packed-nvidia-test.json", packed)
    host = make_packed_rows(
        "gdn", ONE, False, {False: 0.5, True: 1.0}, dataclasses.replace(ORIGIN, device="a processor")
    )
    write_rows(tmp_path / "packed-cpu.json", host)
    counts = Counts(passed=5, failed=1, skipped=2)
    elsewhere = dataclasses.replace(ORIGIN, device="NVIDIA Other", commit="d" * 40, changed=True)
    later = dataclasses.replace(ORIGIN, date="2026-01-03T00:00:00+00:00")
    tests = GpuTests(
        runs=(
            TestRun(origin=elsewhere, files={"a": counts, "b": counts}),
            TestRun(origin=ORIGIN, files={"c": counts}),
            TestRun(origin=later, files={"d": counts}),
        ),
        not_run=("tests/gpu/test_a.py::x",),
    )
    write_tests(tmp_path / "gpu_tests.json", tests)
    repeated = make_call_rows("gdn", ONE, 300, 0, {"k": 2}, ORIGIN) + make_call_rows("kda", ONE, 300, 0, {}, ORIGIN)
    write_rows(tmp_path / "repeatability-nvidia-test.json", repeated)
    page = performance.render(tmp_path)
    where = "NVIDIA Test | 2026-01-02 | abc |"
    elsewhere_line = "NVIDIA Other | 2026-01-02 | ddddddd with uncommitted changes |"
    assert f"| `gpu_tests.py` | 10 passed, 2 failed, 4 skipped | {elsewhere_line}" in page
    assert "| `gpu_tests.py` | 10 passed, 2 failed, 4 skipped | NVIDIA Test | 2026-01-03 | abc |" in page
    assert "| `gpu_tests.py` | 1 not run, interrupted |  |  |  |" in page
    assert f"| `kernels.py --check` | 1 of 2 combinations pass | {where}" in page
    compared_in = "device time 0.500 to 0.500, memory 1.000 to 1.000 of commit 0123456, 1 rows"
    assert f"| `kernels.py --against` | {compared_in} | {where}" in page
    assert f"| `packed.py` | new cu_seqlens per call take 1.10 to 1.10 of the time of one that stays | {where}" in page
    assert "take 2.00 to 2.00 of the time of one that stays | host time, kernels taken out |" in page
    assert f"| `repeatability.py` | gradients differ between 300 calls in 1 of 2 rows | {where}" in page
    assert "## Against commit 0123456, NVIDIA Test, bfloat16" in page
    assert "| gdn | (1,1,1,1,1) | forward | 2.00 | 1.00 | 0.500 | 8.00 | 8.00 | 1.000 |" in page
    assert "| gdn | (1,8192,8,128,128) | 0.500 | 0.550 | 1.10 |" in page
    assert "| gdn | 1.00 / 3.00† = 0.33 | 1.00 / 3.00† = 0.33 | 1.00 / 3.00† = 0.33 | 0.50 |" in page
    assert "| norm 4x8 | forward | ours 0.100, torch 0.300 | ours 0.100, torch 0.300 |" in page
    assert "| (4,2048,8,128,128) | forward + backward | 1.00 | 3.00† | 3.00 |" in page
    assert "| 100 | 200 | 0.500 | 50% |" in page
    assert "| gdn | (64,1,16,128,128) | in place | 1.00 | 1.50 | 1.50 |" in page
    assert "(4,2048,8,128,128): no time, dg 3.0e-02 (budget 2e-02)." in page
    assert "| gdn | (4,2048,8,128,128) | 9.00 | 0.500 |" in page
    assert "- (1,1,1,1,1) forward: 1.00 device time with tied keys; a write key of its own costs 2.0%." in page
    assert "| gdn | twin | o 3.0e-03 |" in page
    assert "1 of 2 combinations" in page
    assert "- gdn (1,63,8,128,128) bfloat16 usual decay: o 1.0e-02 (budget 5e-03)" in page


def test_a_base_without_git_is_named_by_its_files() -> None:
    assert performance_kernels.name_base(dataclasses.replace(ORIGIN, commit="unknown")) == "files def"


def test_rows_of_older_files_are_named() -> None:
    old = dataclasses.replace(ORIGIN, commit="old", versions={"files": "123"}, date="2026-01-01T03:04:00+00:00")
    rows = [
        row
        for op, origin in (("gdn", old), ("gla", old), ("palimpsa", ORIGIN))
        for row in records.make_time_rows(op, ONE, "bfloat16", "auto", {"forward": part(1.0)}, origin)
    ]
    told = records.measured_with_an_op, performance_kernels.name_row
    newest = "Measured 2026-01-02 at commit abc, files def; torch 2.11, flash-linear-attention 0.6.0."
    assert rendering.describe_origins(rows, *told) == (
        f"{newest} Of these files are the rows palimpsa 1,1,1,1,1. 2 rows were measured 2026-01-01 at commit old, files 123."
    )
    assert rendering.describe_origins(rows, records.measured_with_an_op) == (
        f"{newest} 1 row was measured then. 2 rows were measured 2026-01-01 at commit old, files 123."
    )
    assert (
        rendering.describe_origins(select(rows, column={"op": "palimpsa"}), *told) == newest
        and rendering.describe_origins([], *told) == ""
    )


def test_whole_models_have_their_pages(tmp_path: Path) -> None:
    rows = [
        row
        for name, of_base, ms in (("kda", 100.0, 150.0), ("pgdn", 110.0, 220.0))
        for mixer, step in (("gdn", of_base), (name, ms))
        for row in make_step_rows(
            Model(mixer=name),
            Model(mixer=mixer),
            8,
            2048,
            ORIGIN,
            {"step_ms": step, "tokens_per_second": 5e4, "activations_bytes": 3 * 2**30, "first_step_s": 7.0},
        )
    ]
    write_rows(tmp_path / "training-steps-test.json", rows)
    step = {
        "token_ms": 1.5,
        "token_of_whole_call_ms": 1.8,
        "step_ms": 1.2,
        "token_without_graph_ms": 30.0,
        "tokens_per_second": 666.0,
        "first_short_call_ms": 190.0,
        "short_call_ms": 60.0,
        "first_token_ms": 20.0,
    }
    prefill = {"prefill_ms": 30.0, "prefill_share_of_rate": 0.4}
    made = make_generate_rows("gdn", 1, 2048, step, ORIGIN) + make_generate_rows("gdn", 1, 16384, prefill, ORIGIN)
    write_rows(tmp_path / "generate-test.json", made)
    page = performance.render(tmp_path)
    assert "| 24 layers of gdn | 8 x 2,048 | 100 |  |  | 50.0 | 3.00 | 7.00 | 2026-01-02, files def |" in page
    assert "| 24 layers of kda | 8 x 2,048 | 150 | 100 | 1.50 | 50.0 | 3.00 | 7.00 | 2026-01-02, files def |" in page
    assert "| 24 layers of pgdn | 8 x 2,048 | 220 | 110 | 2.00 | 50.0 | 3.00 | 7.00 | 2026-01-02, files def |" in page
    assert page.count("| 24 layers of gdn |") == 1
    assert "| gdn | 1 | 2,048 | 1.50 | 1.80 | 1.20 | 30.0 | 666 | 190 | 60.0 | 20.0 | 2026-01-02, files def |" in page
    assert "gdn: prefill of 16384 tokens in 30.0 ms, 40% of the rate" in page


def test_decoding_has_a_table_and_a_figure(tmp_path: Path) -> None:
    """A memory's speed stands for every context; softmax attention has a row for each, also where it does not fit."""
    speed = {"step_ms": 2.0, "tokens_per_second": 4e3, "state_bytes": 6e6}
    rows = [
        row
        for mixer, context, values in (
            ("gdn", None, speed),
            ("softmax", 2048, speed),
            ("softmax", 131072, {"fits": False}),
        )
        for row in make_rows(
            "decode_table", ORIGIN, values, mixer=mixer, column={"batch": 8, "context": context, "layers": 24}
        )
    ]
    write_rows(tmp_path / "decode-table-test.json", rows)
    page = performance.render(tmp_path)
    assert "| gdn | 6.00 | 2.00 | 4,000 | 2026-01-02, files def |" in page
    assert "| softmax, 2,048 tokens | 6.00 | 2.00 | 4,000 |" in page
    assert "| softmax, 131,072 tokens | – | does not fit | – |" in page
    performance.draw_figures(tmp_path, tmp_path)
    (figure,) = tmp_path.glob("*.png")
    assert f"(images/{figure.name})" in page


@pytest.mark.parametrize(
    ("x", "shown"),
    [(None, "–"), (float("nan"), "–"), (0, "0"), (1234.5, "1,234"), (0.01234, "0.0123"), (9.999, "10.00")],
)
def test_numbers_have_three_digits(x: float | None, shown: str) -> None:
    assert rendering.number(x) == shown
