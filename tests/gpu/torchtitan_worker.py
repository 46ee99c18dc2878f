"""What each process of test_torchtitan.py runs: started by torchrun, trainings by torchtitan that are divided in all the ways of
`CASES`; otherwise two by our own trainer, on one GPU.

Rank 0 writes losses and norms of gradients by case, or the error, to the file rowsN.json in the folder that is named on the
command line, for N processes of torchrun (0 without).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

TENSOR, CONTEXT = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
HALF = {"training.mixed_precision_param": "bfloat16", "compile.enable": True}
SAVES = {"checkpoint.enable": True, "checkpoint.interval": 25}
CONTINUES = {"checkpoint.enable": True, "checkpoint.load_step": 25, "checkpoint.load_only": True}
SAVED = "FSDP2 over 2"  # the case that writes checkpoints
OWN, OWN_ROUNDED = "our own trainer", "our own trainer, bfloat16"
# Settings by the number of processes: those that neither divides, FSDP2 divides.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        SAVED: SAVES,
        "tensor 2": {TENSOR: 2},
        "context 2": {CONTEXT: 2},
        "tensor 2, continued from FSDP2 over 2": {TENSOR: 2, **CONTINUES},
        "FSDP2 over 2, bfloat16, compiled": HALF,
    },
    4: {
        "FSDP2 over 4": {},
        "tensor 2, FSDP2 over 2": {TENSOR: 2},
        "context 4": {CONTEXT: 4},
        "context 2, FSDP2 over 2": {CONTEXT: 2},
        "tensor 2, FSDP2 over 2, continued from FSDP2 over 2": {TENSOR: 2, **CONTINUES},
        "tensor 2, FSDP2 over 2, bfloat16, compiled": {TENSOR: 2, **HALF},
    },
}
MODEL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "mixer": ["gdn", {"name": "softmax", "num_kv_heads": 2}],
}
# Of `own_run`. At a learning rate of 1e-3 steps amplify differences of rounding a thousandfold, at this one hardly.
RUN: dict[str, Any] = {"model": MODEL, "length": 256, "learning_rate": 3e-4, "compile": False, "graphs": False}


def train_divided(folder: Path) -> None:
    from tests.integrations.torchtitan.jobs import train
    from tests.integrations.torchtitan.own_run import STEPS, own_run, settings_of

    processes = int(os.environ["WORLD_SIZE"])
    rows: dict[str, Any] = {}
    for case, settings in CASES[processes].items():
        readers = processes // settings.get(TENSOR, 1) // settings.get(CONTEXT, 1)
        usual = settings_of(own_run(folder, **RUN), readers)
        dump = folder / (SAVED if "checkpoint.enable" in settings else case)
        try:
            found = train({**usual, "dump_folder": str(dump), **settings}, STEPS, False, MODEL)
            rows[case] = {name: list(found[name].values()) for name in ("losses", "norms")}
        except Exception:  # the other cases are worth knowing
            rows[case] = {"error": traceback.format_exc()}
        if os.environ["RANK"] == "0":
            (folder / f"rows{processes}.json").write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def train_alone(folder: Path) -> None:
    from tests.integrations.torchtitan.own_run import own_losses, own_run

    runs = {OWN: {}, OWN_ROUNDED: {"precision": "bf16", "output": str(folder / "rounded")}}
    rows = {name: {"losses": own_losses(own_run(folder, **RUN, **changes))} for name, changes in runs.items()}
    (folder / "rows0.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    (train_divided if "RANK" in os.environ else train_alone)(Path(sys.argv[1]))
