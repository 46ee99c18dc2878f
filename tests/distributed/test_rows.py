"""Which documents cross the borders of a row is found once for all layers of a model, and never for another row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fastweights.distributed import context_parallel
from fastweights.ops import delta_rule
from fastweights.ops.context_parallel import documents
from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.testing.processes import processes

from .parts import own
from .whole_and_parts import batch, close, gradients, language_model, mean_gradients, read

MIXER = ["gdn", "gka"]  # ops of both kinds, behind short convolutions


def find_once(change: Callable[[Any], Any]) -> int:
    """How often documents are looked for in a forward and backward. Another row in the same tensor has its own."""
    whole, given = language_model(MIXER), batch("packed")
    model = change(context_parallel(language_model(MIXER), dist.group.WORLD, "state"))
    edges = given["cu_seqlens"] = given["cu_seqlens"].clone()
    with mock.patch.object(documents, "Documents", wraps=documents.Documents) as made:
        read(model, given)
        count = made.call_count
    made.reset_mock()  # of the arguments
    assert not documents._found
    edges.numpy()[:] += (0, 1, 1, 3, -13, 0)  # which torch does not see, as it does not see that graphs are replayed
    for one in (whole, model):
        one.zero_grad()
    close({"loss": read(model, given).loss}, {"loss": read(whole, given).loss})
    close(mean_gradients(model), gradients(whole))
    return count


def unchanged(model: Any) -> Any:
    return model


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def test_a_model_looks_once() -> None:
    for change in (unchanged, checkpointed):
        assert processes(2).run(find_once, change) == [1, 1]


def overwrite() -> None:
    cp, generator = ContextParallel(dist.group.WORLD, "state"), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 12, 1, 4, generator=generator, dtype=torch.float64)
    given = (q, k, v, torch.ones(1, 12, 1, dtype=torch.float64))
    edges = torch.tensor([0, 5, 12])
    for middle in (5, 6, 7):
        edges.numpy()[1] = middle
        wanted, _ = delta_rule(*given, cu_seqlens=edges)
        found, _ = delta_rule(*(own(x, cp) for x in given), cu_seqlens=edges, cp_group=cp)
        torch.testing.assert_close(found, own(wanted, cp))


def test_an_op_looks_at_every_call() -> None:
    processes(2).run(overwrite)
