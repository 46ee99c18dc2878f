"""Lattice, table 2, 'Books (4k)': 110M.

Printed: Books3, 2.4B tokens, rows of 4,096 tokens, 0.5M tokens per step.
Ours: what lattice-110m.toml marks, and PG-19 in place of Books3, which is no longer on the hub.
"""

from pathlib import Path

from fastweights.training.language import load_run

run = load_run(
    Path(__file__).with_name("lattice-110m.toml"),
    output="runs/papers/lattice-110m-books-4k",
    length=4096,
    batch_size=8,
    accumulation=2,
    overrides=["corpus.dataset=emozilla/pg19"],
)  # 8 GPUs x 8 rows x 2 passes x 4,096 tokens = 524,288 per step
