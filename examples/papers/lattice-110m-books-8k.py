"""Lattice, table 2, 'Books (8k)': 110M.

Printed: Books3, 2.4B tokens, rows of 8,192 tokens, 0.5M tokens per step.
Ours: what lattice-110m.toml marks, and PG-19 in place of Books3, which is no longer on the hub.
"""

from pathlib import Path

from fastweights.training.language import load_run

run = load_run(
    Path(__file__).with_name("lattice-110m.toml"),
    output="runs/papers/lattice-110m-books-8k",
    length=8192,
    batch_size=4,
    accumulation=2,
    overrides=["corpus.dataset=emozilla/pg19"],
)  # 8 GPUs x 4 rows x 2 passes x 8,192 tokens = 524,288 per step
