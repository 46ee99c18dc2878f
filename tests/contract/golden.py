"""The files of float64 answers computed elsewhere (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))


def load(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    arrays = dict(np.load(path))
    return json.loads(str(arrays.pop("static"))), arrays
