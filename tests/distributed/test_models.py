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

from ..layers.variants import OPTIONS, VARIANTS
from .whole_and_parts import BATCHES, batch, close, compare, gradients, language_model, mean_gradients, read

# Kinds of layers: halos, positions and fewer heads of keys than processes, first values, several ops, a state that is learned.
SMALL = [
    ["gdn", {"name": "softmax", "num_kv_heads": 1, "window": 6}, "gka"],
    ["rwkv7", {"name": "rwkv7", "value_residual": True}],
    ["vla-conv", "palimpsa-m", {"name": "ttt", "learned_state": True}],
]
# What layers tell apart: packed rows that begin anew at a border or elsewhere, and a row alone.
LAYOUTS = ("packed", "padded", "one text")
# Mixers, and one with options, whose state after a part of a sequence is no affine function of the state before it.
HEADS_ALONE = {"longhorn-elementwise", "palimpsa-d", "palimpsa-m", "lattice", "ttt", "vla", "vla-conv", "rls decay"}
LINEAR = {"palimpsa-d plain"}  # of a mixer among them, with options by which it is linear attention
WAYS = ("heads", "state")


def compare_all(models: list[Any], way: str, names: tuple[str, ...]) -> None:
    for mixer in models:
        compare(mixer, way, names)


def compare_or_refuse(mixer: Any, way: str, variant: str) -> None:
    """variant: of `VARIANTS`."""
    if way == "state" and HEADS_ALONE & {variant, VARIANTS[variant][0]} and variant not in LINEAR:
        with pytest.raises(ValueError, match="way must be 'heads' or 'auto'"):
            compare(mixer, way, LAYOUTS)
    else:
        compare(mixer, way, LAYOUTS)


def test_small_models_over_two_processes() -> None:
    processes(2).run(compare_all, SMALL, "heads", ("packed",))
    processes(2).run(compare_all, SMALL[:2], "state", ("packed",))


def test_every_layout_of_a_batch() -> None:
    processes(2).run(compare_all, [["gdn"]], "heads", tuple(BATCHES))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer: str, size: int, way: str) -> None:
    processes(size).run(compare_or_refuse, mixer, way, mixer)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", OPTIONS)
def test_every_option(variant: str, way: str) -> None:
    name, options = OPTIONS[variant]
    processes(2).run(compare_or_refuse, {"name": name, **options}, way, variant)


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def compiled(model: Any) -> nn.Module:
    torch.compiler.reset()  # of blocks that this process has compiled before
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
    """In bfloat16 the gradients are at most twice as far from those of float64 as in one process."""
    exact, given = language_model(SMALL[0]), batch("packed")
    whole = deepcopy(exact).float()
    parts = context_parallel(deepcopy(whole), dist.group.WORLD)
    wanted = read(exact, given).loss
    with torch.autocast("cpu", torch.bfloat16):
        losses = [read(model, given).loss.double() for model in (whole, parts)]
    torch.testing.assert_close(losses, [wanted] * 2, rtol=2**-8, atol=0.0)
    true, of_whole, of_parts = (
        torch.cat([x.double().flatten() for x in one.values()])
        for one in (gradients(exact), gradients(whole), mean_gradients(parts))
    )
    assert (of_parts - true).norm() < 2 * (of_whole - true).norm() < true.norm()


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


@pytest.mark.slow
def test_checkpointed_and_repeated() -> None:
    processes(2).run(compare_changed, checkpointed)
    processes(2).run(compare_repeated)
    processes(2).run(compare_autocast)


def test_wrapped() -> None:
    processes(2).run(compare_wrapped)


@pytest.mark.slow
def test_compiled() -> None:
    processes(2).run(compare_changed, compiled)
