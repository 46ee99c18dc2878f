"""What each process of test_context_parallel.py runs: models over all GPUs beside the same ones on this GPU alone.

The command line names a file and models. Writes to the file, for every one of them and way, relative errors of loss and
gradients against float32: those of one GPU in bfloat16, those of all GPUs in bfloat16, and whether a second run had the same
bits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.distributed import context_parallel
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gdn": ("gdn", ("state", "heads")),
    "gka": ("gka", ("state", "heads")),
    "hybrid": (["gdn", {"name": "softmax", "num_kv_heads": 2}, "gka"], ("heads",)),
    "pgdn": ("pgdn", ("state",)),
    "palimpsa-d": ("palimpsa-d", ("heads",)),
    "kda": ("kda", ("state",)),
    "gla": ("gla", ("state",)),
    "lattice": ("lattice", ("heads",)),
    "vla": ("vla", ("heads",)),
}
COMPILED = "gdn"  # by blocks too
LENGTH = 4096
DOCUMENTS = (0, 700, 1024, 3300, 4096)


def build(mixer: Any) -> FastWeightsForCausalLM:
    config = FastWeightsConfig(
        mixer=mixer, vocab_size=512, hidden_size=512, num_hidden_layers=3, num_heads=4, initializer_range=0.05
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return FastWeightsForCausalLM(config).train()


def read(model: Any, given: dict[str, Tensor], half: bool, ranks: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients: the means over the ranks."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = model(**given).loss
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    for x in gradients.values():
        if ranks > 1:
            dist.all_reduce(x)
            x /= ranks
    return loss.detach(), {name: x.clone() for name, x in gradients.items()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together, each relative to its own size."""
    shares = [((found[name] - x).norm() / x.norm()).square() for name, x in wanted.items() if x.norm() > 0]
    return float(torch.stack(shares).mean().sqrt())


def work(path: Path, names: Sequence[str]) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else deterministic algorithms refuse cuBLAS
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, rows = dist.get_world_size(), {}
    ids = torch.randint(512, (1, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda")
    given = {"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens}
    for name in names:
        mixer, ways = MODELS[name]
        # The backward of torch's flash attention adds in the order of arrival otherwise, on one GPU too.
        torch.use_deterministic_algorithms(name == "hybrid")
        whole = build(mixer)
        exact_loss, exact = read(whole, given, half=False)

        def errors(loss: Tensor, gradients: dict[str, Tensor], loss_0: Tensor = exact_loss, exact: Any = exact) -> Any:
            return {"loss": float((loss - loss_0).abs() / loss_0), "gradients": distance(gradients, exact)}

        alone = errors(*read(whole, given, half=True))
        for way in ways:
            for compiled in (False, True) if name == COMPILED else (False,):
                model = context_parallel(deepcopy(whole), dist.group.WORLD, way)  # type: ignore[arg-type]
                if compiled:
                    for block in model.model.layers:
                        block.compile(fullgraph=True)
                found, again = read(model, given, True, ranks), read(model, given, True, ranks)
                rows[f"{name} {way}{' compiled' if compiled else ''}"] = {
                    "alone": alone,
                    "divided": errors(*found),
                    "float32": errors(*read(model, given, False, ranks)),
                    "same_bits": torch.equal(found[0], again[0])
                    and all(torch.equal(x, again[1][key]) for key, x in found[1].items()),
                }
                if dist.get_rank() == 0:
                    path.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
