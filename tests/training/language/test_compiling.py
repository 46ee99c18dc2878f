"""A training by torch.compile: what is compiled once is used in every step, and the losses are those without it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language import compiling, train, train_language


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


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}
SMALL = {**SIZES, "mixer": "gdn"}
SMALLER = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "linear"}  # is compiled in less time


TWICE, BF16 = {"gradient_checkpointing": True}, {"precision": "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "changes"),
    [
        pytest.param("blocks", {}, id="blocks"),
        pytest.param("blocks", TWICE, id="blocks, twice"),
        pytest.param("blocks", BF16, id="blocks, bf16"),
        pytest.param(True, {}, id="whole"),
        pytest.param(True, TWICE, id="whole, twice"),
        pytest.param(True, BF16, id="whole, bf16"),
    ],
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


@pytest.mark.slow
def test_rows_of_one_document_are_not_compiled_for_themselves(make_run, graphs):
    settings = {"model": SMALLER, "max_steps": 5, "batch_size": 1, "context_lengths": ()}
    eager = train_language(make_run("eager", compile=False, **settings))[0]
    compiled = train_language(make_run("compiled", compile="blocks", **settings))[0]
    assert len(graphs) == 1
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"model": {**SMALL, "mixer": ["linear", "deltanet"]}}, {"model": SIZES, "mixers": ("linear", "deltanet")}],
    ids=["layers", "trainings"],
)
@pytest.mark.slow
def test_more_kinds_of_blocks_than_torch_compiles_by_itself(make_run, graphs, changes):
    """Those past its limit would run uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=1):
        train_language(make_run(compile="blocks", max_steps=1, context_lengths=(), **changes))
    assert len(graphs) == 2


BY_TORCH = f"import os, torch._dynamo; print(os.environ['{compiling.KEPT}'], end='')"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != compiling.KEPT}


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_compiled_code_is_kept_beside_the_tokens(make_run, graphs, monkeypatch, tmp_path, named):
    """torch sets its variable by itself, to a temporary folder, when it is imported; one that a user has set stays."""
    by_torch = [sys.executable, "-c", BY_TORCH]
    folder = tmp_path / "mine" if named else subprocess.check_output(by_torch, env=ENVIRONMENT, text=True)
    monkeypatch.setenv(compiling.KEPT, str(folder))
    run = make_run(model=SMALL, compile="blocks", max_steps=1, context_lengths=())
    train_language(run)
    folder = Path(os.environ[compiling.KEPT])
    assert folder == tmp_path / "mine" if named else folder.parent == Path(run.cache).absolute()


def test_a_second_training_keeps_compiled_code_in_its_own_folder(graphs, monkeypatch, tmp_path):
    """torch's variable holds the folder of the first one then."""
    monkeypatch.setenv(compiling.KEPT, compiling.TEMPORARY)
    for name in ("first", "second"):
        compiling.compile_model(FastWeightsForCausalLM(FastWeightsConfig(**SMALL)), "blocks", str(tmp_path / name))
        assert Path(os.environ[compiling.KEPT]).parent == tmp_path / name


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", False])
def test_the_compiler_loads_beside_the_drawing_of_weights(make_run, graphs, monkeypatch, what):
    """In another thread, whose failure ends no training, and only where something is compiled."""
    loading, threads, build = threading.Event(), [], train.build_model

    def fail():
        threads.append(threading.current_thread())
        loading.set()
        raise ImportError

    def built(*given):
        assert not what or loading.wait(60)
        return build(*given)

    monkeypatch.setattr(compiling, "import_compiler", fail)
    monkeypatch.setattr(train, "build_model", built)
    assert train_language(make_run(model=SMALLER, compile=what, max_steps=1, context_lengths=()))
    assert len(threads) == bool(what) == bool(graphs) and threading.main_thread() not in threads


@pytest.mark.slow
def test_the_loaded_compiler_is_the_whole_one_and_the_gpu_starts():
    code = """
import sys, torch
from fastweights.training.language.compiling import compiler_loading
started, zeros = [], torch.zeros
torch.zeros = lambda *sizes, device: started.append(device) or zeros(*sizes, device=device)
with compiler_loading("blocks", torch.device("cpu")):
    pass
assert "torch._inductor.compile_fx" in sys.modules and started == [torch.device("cpu")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_gpu_decides_where_the_run_does_not(make_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiling.what_to_compile(make_run()) is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiling.what_to_compile(make_run()) == "blocks"
    assert compiling.what_to_compile(make_run(compile=False)) is False


def test_sharded_parameters_are_compiled_by_blocks(make_run):
    with pytest.raises(ValueError, match='compile must not be True with fsdp.*"blocks"'):
        make_run(fsdp=True, compile=True)
