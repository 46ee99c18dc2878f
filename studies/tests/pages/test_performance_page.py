"""docs/performance.md is what its generator makes of the result files, and the generator shows what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastweights_studies.pages import performance, performance_text

ORIGIN = {
    "time": "2026-01-02T00:00:00+00:00",
    "commit": "abc",
    "device": "NVIDIA Test",
    "torch": "2.11",
    "fla": "0.6.0",
}


def part(ours: float, fla: float, **more: Any) -> dict[str, Any]:
    spread = {"ours": [ours] * 3, "fla": [fla] * 3}
    return {"floor_ms": 0.5, "bound": "memory", "graph": spread, "eager": spread, **more}


def test_page_is_generated() -> None:
    command = "python -m fastweights_studies.pages.performance"
    assert performance.PAGE.read_text() == performance.render(), f"run {command}"
    assert command in performance.PAGE.read_text()


def test_page_of_made_up_results(tmp_path: Path) -> None:
    times = part(1.0, 3.0, peak_mb={"ours": 100.0, "fla": 200.0})
    written = {**times, "graph": {"ours": [1.02] * 3, "tied": [1.0] * 3}}
    rows = {
        "gdn 4,2048,8,128,128": {
            "errors": {"ours": {"o": 2e-3}, "fla": {"o": 4e-3}}, "stateful_errors": {"ours": {"S": 1e-3}, "twin": {"o": 3e-3}},
            "forward": times, "forward_backward": times,
        },
        "gdn first call 4,2048,8,128,128": {"empty_cache_s": 9.0, "warm_cache_s": 0.5},
        "gdn decode 64,1,16,128,128": {"errors": {"ours": {"o": 1e-3}}, "in_place": True, "decode": part(1.0, 1.5)},
        "gdn-write 1,1,1,1,1": {"forward": written, "forward_backward": written},
        "kda 4,2048,8,128,128": {"errors": {}, "refused": ["dg 3.0e-02 (budget 2e-02)"]},
    }  # fmt: skip
    ceilings = {"bandwidth": 4e12, "rate": 7e14}
    content = {**ORIGIN, "dtype": "bfloat16", "backend": "auto", "ceilings": ceilings, "rows": rows}
    (tmp_path / "kernels-nvidia-test.json").write_text(json.dumps(content))
    checks = {"a": {"failures": []}, "gdn (1,63,8,128,128) bfloat16": {"failures": ["o 1.0e-02 (budget 5e-03)"]}}
    worst = {"gdn": {"half": {"o": 1e-2}}}
    (tmp_path / "kernel-checks-nvidia-test.json").write_text(json.dumps({**ORIGIN, "rows": checks, "worst": worst}))
    fused = {
        **ORIGIN,
        "rows": {"gated norm": {"forward": {"graph": {"ours": [0.1], "torch": [0.3]}, "eager": {"ours": [0.2]}}}},
    }
    (tmp_path / "fused-nvidia-test.json").write_text(json.dumps(fused))
    compared = {
        "gdn 1,1,1,1,1 forward": {
            "ms": {"base": 2.0, "ours": 1.0}, "mb": {"base": 8.0, "ours": 8.0}, "time_ratio": 0.5, "memory_ratio": 1.0,
        }
    }  # fmt: skip
    against = {**ORIGIN, "dtype": "bfloat16", "against": {"commit": "0123456789"}, "rows": compared}
    (tmp_path / "kernels-against-nvidia-test.json").write_text(json.dumps(against))
    row = {"unchanging_ms": 0.5, "changing_ms": 0.55, "ratio": 1.1}
    packed = {**ORIGIN, "sequences": 16, "rows": {"gdn 1,8192,8,128,128": row}}
    (tmp_path / "packed-nvidia-test.json").write_text(json.dumps(packed))
    counts = {"passed": 5, "failed": 1, "skipped": 2}
    tests = {
        "not run": ["tests/gpu/test_a.py::x"],
        "runs": [
            {
                **ORIGIN,
                "device": "NVIDIA Other",
                "commit": f"{'d' * 40} with uncommitted changes",
                "files": {"a": counts, "b": counts},
            },
            {**ORIGIN, "files": {"c": counts}},
            {**ORIGIN, "time": "2026-01-03T00:00:00+00:00", "files": {"d": counts}},
        ],
    }
    (tmp_path / "gpu_tests.json").write_text(json.dumps(tests))
    repeated = {**ORIGIN, "calls": 300, "rows": {"gdn 1,1,1,1,1": {"dk": 2}, "kda 1,1,1,1,1": {}}}
    (tmp_path / "repeatability-nvidia-test.json").write_text(json.dumps(repeated))
    page = performance.render(tmp_path)
    where = "NVIDIA Test | 2026-01-02 | abc |"
    other = "NVIDIA Other | 2026-01-02 | ddddddd with uncommitted changes |"
    assert f"| `gpu_tests.py` | 10 passed, 2 failed, 4 skipped | {other}" in page
    assert "| `gpu_tests.py` | 10 passed, 2 failed, 4 skipped | NVIDIA Test | 2026-01-03 | abc |" in page
    assert "| `gpu_tests.py` | 1 not run, interrupted |  |  |  |" in page
    assert f"| `kernels.py --check` | 1 of 2 combinations pass | {where}" in page
    compared_in = "device time 0.500 to 0.500, memory 1.000 to 1.000 of commit 0123456, 1 rows"
    assert f"| `kernels.py --against` | {compared_in} | {where}" in page
    assert f"| `packed.py` | new cu_seqlens per call take 1.10 to 1.10 of the time of one that stays | {where}" in page
    assert f"| `repeatability.py` | gradients differ between 300 calls in 1 of 2 rows | {where}" in page
    assert "## Against commit 0123456, NVIDIA Test, bfloat16" in page
    assert "| gdn | (1,1,1,1,1) | forward | 2.00 | 1.00 | 0.500 | 8.00 | 8.00 | 1.000 |" in page
    assert "| gdn | (1,8192,8,128,128) | 0.500 | 0.550 | 1.10 |" in page
    assert "| gdn | 1.00 / 3.00† = 0.33 | 1.00 / 3.00† = 0.33 | 1.00 / 3.00† = 0.33 | 0.50 |" in page
    assert "| gated norm | forward | ours 0.100, torch 0.300 | ours 0.200 |" in page
    assert "| (4,2048,8,128,128) | forward + backward | 1.00 | 3.00† | 3.00 |" in page
    assert "| 100 | 200 | 0.500 | 50% |" in page
    assert "| gdn | (64,1,16,128,128) | in place | 1.00 | 1.50 | 1.50 |" in page
    assert "(4,2048,8,128,128): no time, dg 3.0e-02 (budget 2e-02)." in page
    assert "| gdn | (4,2048,8,128,128) | 9.00 | 0.500 |" in page
    assert "- (1,1,1,1,1) forward: 1.00 device time with tied keys; a write key of its own costs 2.0%." in page
    assert "| gdn | twin | o 3.0e-03 |" in page
    assert "1 of 2 combinations" in page and "- gdn (1,63,8,128,128) bfloat16: o 1.0e-02 (budget 5e-03)" in page


def test_a_base_without_git_is_named_by_its_files() -> None:
    assert performance.base_name({"against": {"commit": "unknown", "source": "0f"}}) == "files 0f"


def test_rows_of_older_files_are_named() -> None:
    when = {"time": "2026-01-02T03:04", "commit": "abc", "source": "def"}
    rows = {"gdn 1": {"measured": when}, "gla 1": {"measured": when}, "palimpsa 1": {}}
    said = performance_text.older({"rows": rows})
    assert said == (
        " Of these files are the rows palimpsa 1. 2 rows were measured 2026-01-02 at commit abc, files def."
    )
    assert performance_text.older({"rows": {"gdn 1": {}}}) == "" == performance_text.older({})


def test_whole_models_have_their_pages(tmp_path: Path) -> None:
    when = {"measured": {"time": "2026-01-02T00:00:00", "source": "abc"}}
    model = {"tokens/s": 5e4, "activations, GiB": 3.0, "first step, s": 7.0}
    models = {"base": {**model, "step, ms": [100.0] * 3}, "ours": {**model, "step, ms": [150.0] * 3}}
    again = {"base": {**models["base"], "step, ms": [110.0] * 3}, "other": {**model, "step, ms": [220.0] * 3}}
    size = {"batch": 8, "length": 2048}
    compared = {"ours": {**size, "models": models, **when}, "other": {**size, "models": again, **when}}
    step = {
        "ms per token": 1.5,
        "all, ms per token": 1.8,
        "step, ms": 1.2,
        "without a graph, ms per token": 30.0,
        "tokens/s": 666.0,
    }
    made = {"prompt": 2048, "batch 1": step, "prefill of 16384": {"ms": 30.0, "share of the rate": 0.4}, **when}
    (tmp_path / "training-steps-test.json").write_text(json.dumps({**ORIGIN, "comparisons": compared}))
    (tmp_path / "generate-test.json").write_text(json.dumps({**ORIGIN, "mixers": {"gdn": made}}))
    page = performance.render(tmp_path)
    assert "| base | 8 x 2,048 | 100 |  |  | 50.0 | 3.00 | 7.00 | 2026-01-02, files abc |" in page
    assert "| ours | 8 x 2,048 | 150 | 100 | 1.50 | 50.0 | 3.00 | 7.00 | 2026-01-02, files abc |" in page
    assert "| other | 8 x 2,048 | 220 | 110 | 2.00 | 50.0 | 3.00 | 7.00 | 2026-01-02, files abc |" in page
    assert page.count("| base |") == 1
    assert "| gdn | 1 | 1.50 | 1.80 | 1.20 | 30.0 | 666 | 2026-01-02, files abc |" in page
    assert "gdn: prefill of 16384 tokens in 30.0 ms, 40% of the rate" in page


def test_decoding_has_a_table_and_a_figure(tmp_path: Path) -> None:
    """A memory's speed stands for every context; softmax attention has a row for each, also where it does not fit."""
    when = {"measured": {"time": "2026-01-02T00:00:00", "source": "abc"}}
    speed = {"step, ms": [2.0] * 3, "tokens/s": 4e3, "state, bytes per sequence": 6e6, **when}
    rows = {
        "gdn": {"mixer": "gdn", "batch": 8, "context": None, **speed},
        "short": {"mixer": "softmax", "batch": 8, "context": 2048, **speed},
        "long": {"mixer": "softmax", "batch": 8, "context": 131072, "refused": "does not fit", **when},
    }
    (tmp_path / "decode-table-test.json").write_text(json.dumps({**ORIGIN, "layers": 24, "rows": rows}))
    page = performance.render(tmp_path)
    assert "| gdn | 6.00 | 2.00 | 4,000 | 2026-01-02, files abc |" in page
    assert "| softmax, 2,048 tokens | 6.00 | 2.00 | 4,000 |" in page
    assert "| softmax, 131,072 tokens | – | does not fit | – |" in page
    performance.draw_figures(tmp_path, tmp_path)
    (figure,) = tmp_path.glob("*.png")
    assert f"(images/{figure.name})" in page
