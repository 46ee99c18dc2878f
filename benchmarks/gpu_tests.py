"""Runs the tests that need a GPU and those of kernels on it, and writes what passed, the worst errors and the versions.

python benchmarks/gpu_tests.py [arguments of pytest, such as -n 8]

Into gpu_tests.json, or where -k or files choose among the tests into gpu_tests_chosen.json. An interrupted run (Ctrl-C, or
`timeout -s INT 300 python benchmarks/gpu_tests.py`) writes what ran until then, and that it was interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
import transformers
from environment import describe, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def run(command: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """The exit code, and whether the run was interrupted. pytest gets one interrupt, which lets it write its report."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(), False
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait(), True


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these tests need an NVIDIA GPU, and torch sees none")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu or kernels", f"--junitxml={report}", *sys.argv[1:]]
        # The references run on the CPU, in as many processes as pytest is given.
        code, interrupted = run(command, {"OMP_NUM_THREADS": "1", **os.environ})
        suite = ElementTree.parse(report).getroot()
    # By op, backend, and dtype with what was compared.
    worst: dict[str, dict[str, dict[str, float]]] = {}
    for case in suite.iter("testcase"):
        recorded = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
        if "op" in recorded:
            errors = worst.setdefault(recorded.pop("op"), {}).setdefault(recorded.pop("backend"), {})
            for what, error in recorded.items():
                errors[what] = max(errors.get(what, 0.0), float(error))
    counts = next(suite.iter("testsuite")).attrib
    failed = int(counts["failures"]) + int(counts["errors"])
    content = {
        **describe(), "device": torch.cuda.get_device_name(), "transformers": transformers.__version__,
        "arguments": sys.argv[1:], "interrupted": interrupted,
        "passed": int(counts["tests"]) - failed - int(counts["skipped"]), "failed": failed, "skipped": int(counts["skipped"]),
        "worst relative errors against float64": worst,
    }  # fmt: skip
    chosen = any(argument == "-k" or argument.startswith("tests") for argument in sys.argv[1:])
    result = RESULTS / ("gpu_tests_chosen.json" if chosen else "gpu_tests.json")
    write_json(result, content)
    print(f"written to {result}")
    sys.exit(code)


if __name__ == "__main__":
    main()
