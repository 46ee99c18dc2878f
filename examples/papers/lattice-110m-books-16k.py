"""Lattice, table 2, 'Books (16k)': 110M.

Printed: Books3, 2.4B tokens, rows of 16,384 tokens, 0.5M tokens per step.
Ours: what lattice-110m.toml marks, and PG-19 in place of Books3, which is no longer on the hub.
The table has no number of the Transformer and of Lattice-ENC at this length.
"""

from pathlib import Path

from fastweights.training.language import load_run

run = load_run(
    Path(__file__).with_name("lattice-110m.toml"),
    presets=(
        "linear-110m-lattice",
        "mamba2-110m-lattice",
        "deltanet-110m-lattice",
        "gdn-110m-lattice",
        "ttt-110m-lattice",
        "lattice-110m",
        "lattice-similarity-110m",
    ),
    output="runs/papers/lattice-110m-books-16k",
    length=16384,
    batch_size=2,
    accumulation=2,
    overrides=["corpus.dataset=emozilla/pg19"],
)  # 8 GPUs x 2 rows x 2 passes x 16,384 tokens = 524,288 per step
