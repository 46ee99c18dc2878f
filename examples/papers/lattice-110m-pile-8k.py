"""Lattice, table 2, 'Pile (8k)': 110M.

Printed: the Pile, 2.4B tokens, rows of 8,192 tokens, 0.5M tokens per step.
Ours: what lattice-110m.toml marks.
"""

from pathlib import Path

from fastweights.training.language import load_run

run = load_run(
    Path(__file__).with_name("lattice-110m.toml"),
    output="runs/papers/lattice-110m-pile-8k",
    length=8192,
    batch_size=4,
    accumulation=2,
)  # 8 GPUs x 4 rows x 2 passes x 8,192 tokens = 524,288 per step
