"""A training by torch.compile: what is compiled once is used in every step, and the losses are those without it."""

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from fastweights.training.language import compiling, train_language


@pytest.fixture
def graphs(monkeypatch, tmp_path):
    """How many graphs have been compiled, as a list that grows. Kernels are not written: that takes a C++ compiler."""
    made = []
    by_autograd = lookup_backend("aot_eager")

    def count(graph, inputs):
        made.append(graph)
        return by_autograd(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", count)
    monkeypatch.setenv(compiling.KEPT, str(tmp_path / "compiled"))
    yield made
    torch._dynamo.reset()


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "mixer": "gdn"}


@pytest.mark.parametrize("what", ["blocks", True])
@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}, {"precision": "bf16"}], ids=["", "twice", "bf16"]
)
def test_compiled_once_with_the_losses_of_an_eager_training(make_run, graphs, what, changes):
    """Rows of other documents in every step, held-out rows and checkpoints in between."""
    settings = {"model": SMALL, "max_steps": 6, "batch_size": 3, **changes}
    eager = train_language(make_run("eager", compile=False, **settings))[0]
    assert not graphs
    compiled = train_language(make_run("compiled", compile=what, **settings))[0]
    assert len(graphs) == 1
    close = {"rtol": 2e-2, "atol": 2e-2} if "precision" in changes else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(compiled.losses, eager.losses, **close)
    torch.testing.assert_close(compiled.held_out_losses, eager.held_out_losses, **close)


def test_a_gpu_decides_where_the_run_does_not(make_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiling.what_to_compile(make_run()) is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiling.what_to_compile(make_run()) == "blocks"
    assert compiling.what_to_compile(make_run(compile=False)) is False


def test_sharded_parameters_are_compiled_by_blocks(make_run):
    with pytest.raises(ValueError, match='compile must not be True with fsdp.*"blocks"'):
        make_run(fsdp=True, compile=True)
