"""What a new rule takes: its folder, and its name among those of ops/__init__.py. It then passes the whole contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOY = '''
"""A toy rule: linear attention with a gain."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, sequential, stack_time, op
from ..framework.spec import Case, OpSpec, Output, State


def reference(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    outputs = []
    for t in range(v.shape[1]):
        S = S + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)


def chunked(q, k, v, beta, S, sequences):
    from ..linear_attention.chunked import chunked as linear

    return linear(q, k, beta[..., None] * v, None, S, sequences)


SPEC = OpSpec(
    name="toy",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.GAIN},
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked)},
    cases={"": Case()},
    equation="S = S + beta k v^T; o = S^T q",
)


@op(SPEC)
def toy(
    q, k, v, beta, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, backend="auto"
):
    return call(
        SPEC, (q, k, v, beta), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )
'''


def copy_with_toy(folder: Path) -> None:
    for name in ("fastweights", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "fastweights" / "ops" / "toy").mkdir()
    (folder / "fastweights" / "ops" / "toy" / "__init__.py").write_text(TOY.lstrip())
    names = folder / "fastweights" / "ops" / "__init__.py"
    text = names.read_text()
    assert text.count("__all__ = [\n") == 1
    names.write_text(text.replace("__all__ = [\n", 'from .toy import toy\n\n__all__ = [\n    "toy",\n'))


@pytest.mark.slow
def test_a_new_op_is_its_folder_and_a_line(tmp_path: Path) -> None:
    copy_with_toy(tmp_path)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/contract"),
        *("-k", "toy", "-m", "not slow", "-rA"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]
    passed = {
        line.partition("::")[2].partition("[")[0] for line in ended.stdout.splitlines() if line.startswith("PASSED")
    }
    needed = {
        *("test_gradcheck", "test_fullgraph", "test_opcheck", "test_packed_is_separate", "test_dtypes", "test_shapes"),
        *("test_bad_numbers_reach_what_depends_on_them_and_nothing_else", "test_segments_are_the_whole", "test_states"),
    }
    assert needed <= passed, needed - passed
