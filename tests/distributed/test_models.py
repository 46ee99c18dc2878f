"""A language model over several processes has the loss, the gradients and the hidden states that it has in one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastweights.distributed import context_parallel
from fastweights.layers import MIXERS
from fastweights.testing.processes import processes

from ..layers.variants import OPTIONS
from .whole_and_parts import BATCHES, batch, close, compare, gradients, language_model, mean_gradients, read

# Kinds of layers: halos, positions and fewer heads of keys than processes, first values, several ops, a state that is learned.
SMALL = [
    ["gdn", {"name": "softmax", "num_kv_heads": 1, "window": 6}, "gka"],
    ["rwkv7", {"name": "rwkv7", "value_residual": True}],
    ["vla-conv", "palimpsa-m", {"name": "ttt", "learned_state": True}],
]
LAYOUTS = (
    "packed",
    "padded",
    "one text",
)  # what layers tell apart: packed rows that end at a border or later, a row alone
STATE = [name for name in MIXERS if name in ("linear", "gdn", "gka")]


def compare_all(models: list[Any], way: str, names: tuple[str, ...] = tuple(BATCHES)) -> None:
    for mixer in models:
        compare(mixer, way, names)


def test_small_models_over_two_processes() -> None:
    processes(2).run(compare_all, SMALL[:1], "heads")
    processes(2).run(compare_all, SMALL[1:], "heads", ("packed", "padded"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer: str, size: int) -> None:
    processes(size).run(compare, mixer, "heads", LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OPTIONS)
def test_every_option(variant: str) -> None:
    name, options = OPTIONS[variant]
    processes(2).run(compare, {"name": name, **options}, "heads", LAYOUTS)


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def compiled(model: Any) -> nn.Module:
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def compare_changed(*changes: Callable[[Any], nn.Module]) -> None:
    for change in changes:
        compare(SMALL[0], "heads", ("packed",), change)


def shard(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare_wrapped() -> None:
    """DistributedDataParallel and FSDP2 leave the gradient of one process, without being told of the parts."""
    whole, given = language_model(SMALL[0]), batch("packed")
    read(whole, given)
    for wrap in (DistributedDataParallel, shard):
        model = context_parallel(language_model(SMALL[0]), dist.group.WORLD)
        read(wrap(model), given)
        found = gradients(model)
        close({name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}, gradients(whole))


def compare_autocast() -> None:
    """In bfloat16 the difference is far below the rounding of one number."""
    whole = language_model(SMALL[0]).float()
    parts, given = context_parallel(deepcopy(whole), dist.group.WORLD), batch("packed")
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = (read(model, given).loss for model in (whole, parts))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)
    found_all, wanted_all = (
        torch.cat([x.flatten() for x in one.values()]) for one in (mean_gradients(parts), gradients(whole))
    )
    assert (found_all - wanted_all).norm() < 2**-8 * wanted_all.norm()


def compare_repeated() -> None:
    """Bit for bit."""
    model, given = context_parallel(language_model(SMALL[0]), dist.group.WORLD), batch("packed")
    runs = []
    for _ in range(3):
        model.zero_grad()
        loss = read(model, given).loss
        runs.append({"loss": loss, **mean_gradients(model)})
    for run in runs[1:]:
        assert all(torch.equal(run[name], x) for name, x in runs[0].items())


def test_checkpointed_and_repeated() -> None:
    processes(2).run(compare_changed, checkpointed)
    processes(2).run(compare_repeated)
    processes(2).run(compare_autocast)


def test_wrapped() -> None:
    processes(2).run(compare_wrapped)


@pytest.mark.slow
def test_compiled() -> None:
    processes(2).run(compare_changed, compiled)
