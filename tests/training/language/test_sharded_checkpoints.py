"""Checkpoints are written while the training goes on, and any number of processes continues them, sharded or not."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastweights.evaluation import load_language_model
from fastweights.files import damage
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.results.language import load_result
from fastweights.testing.processes import processes
from fastweights.training.checkpoints import CheckpointError, SaveError, checkpoint_step, checkpoints_in
from fastweights.training.language import background, callbacks, load_run, sharded_checkpoints, train_language

from .launching import torchrun
from .small import log, losses

FSDP = Path(__file__).with_name("fsdp_on_cpu.py")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WAIT = 60.0  # seconds until a test that would hang fails


def tensors_of(run, step):
    """By the names of their files, and their own."""
    folder = Path(run.output, f"checkpoints/checkpoint-{step}")
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name} {name}": x for file in files for name, x in load_file(file).items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.fixture
def before_steps(monkeypatch):
    """Calls a function before every step, with the number of steps that are done."""

    def arrange(work):
        monkeypatch.setattr(
            callbacks.StopAt, "on_step_begin", lambda self, args, state, control, **kwargs: work(state.global_step)
        )

    return arrange


def test_copies_of_all_checkpoints_share_memory():
    """torch 2.11 and 2.12 close what copies after its first time."""
    weight, stager = torch.zeros(3), background._Stager()
    first = stager.stage({"weight": weight})["weight"]
    second = stager.stage({"weight": weight.add_(1)})["weight"]
    stager.close()
    assert second.data_ptr() == first.data_ptr() and torch.equal(second, torch.ones(3))
    with pytest.raises(KeyError):  # it is closed
        stager.stage({"weight": weight})


def test_steps_go_on_while_a_checkpoint_is_written(make_run, monkeypatch, before_steps):
    whole, run = (make_run(name, keep_checkpoints=3) for name in ("whole", "slow"))
    train_language(whole)
    save_file, may_write, saved, seen = sharded_checkpoints.save_file, threading.Event(), [], {}

    def slow(tensors, path, **kwargs):
        assert may_write.wait(WAIT)
        saved.append(path.parts[-2 if path.name == "model.safetensors" else -3])
        save_file(tensors, path, **kwargs)

    def watch(done):
        seen[done] = [path.name for path in checkpoints_in(Path(run.output, "checkpoints"))]
        if done == 5:
            may_write.set()

    monkeypatch.setattr(sharded_checkpoints, "save_file", slow)
    before_steps(watch)
    train_language(run)
    assert seen[3] == seen[4] == seen[5] == [] and "checkpoint-3" in seen[6]  # which waits for it
    assert saved == ["checkpoint-3"] * 2 + ["checkpoint-6"] * 2 + ["checkpoint-8"] * 2
    assert log(run) == log(whole)
    for step in (3, 6, 8):  # what the steps change that are taken meanwhile is not written
        assert_equal(tensors_of(run, step), tensors_of(whole, step))


def test_a_failed_write_ends_the_training_before_the_next_checkpoint(make_run, monkeypatch, before_steps):
    def fail(tensors, path, **kwargs):
        raise OSError(28, "No space left on device", str(path))

    run = make_run()
    monkeypatch.setattr(sharded_checkpoints, "save_file", fail)
    before_steps(lambda done: time.sleep(0.5 * (done == 4)))
    with pytest.raises(SaveError, match="of step 3 could not be written to .*checkpoints: No space left on device"):
        train_language(run)
    assert 3 <= len(losses(run)) <= 5
    assert not any(Path(run.output, "checkpoints").iterdir())


def test_moments_of_another_optimizer_are_refused(make_run, tmp_path):
    train_language(make_run("first", stages=(), max_steps=2, evaluate_every=0, checkpoint_every=2))
    second = make_run(
        "second", model={"path": str(tmp_path / "first")}, keep_optimizer=True, optimizer="adafactor", max_steps=2
    )
    with pytest.raises(CheckpointError, match="must be of a training with the same optimizer, but has .* moments"):
        train_language(second)


def test_every_tensor_is_written_by_one_process_and_all_write_about_as_much():
    tensors = {f"weight{size}": torch.zeros(size, size) for size in (2, 30, 17, 16, 15, 5)}
    parts = [sharded_checkpoints._own_part(tensors, rank, 3, whole=False) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    numbers = [sum(x.numel() for x in part.values()) for part in parts]
    assert numbers == [30 * 30, 17 * 17 + 5 * 5 + 2 * 2, 16 * 16 + 15 * 15]


def small_training(sharded):
    """A model and its optimizer after one step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "gdn"}
    model = FastWeightsForCausalLM(FastWeightsConfig(**sizes, tie_word_embeddings=True))
    if sharded:
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(40).reshape(1, -1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return model, optimizer


def whole_tensors(model, optimizer):
    state = {**get_model_state_dict(model), **get_optimizer_state_dict(model, optimizer, options=FLAT)}
    return {
        name: x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()
        for name, x in state.items()
        if isinstance(x, torch.Tensor)
    }


def save(folder, sharded):
    """Write a checkpoint of step 1; returns its tensors."""
    model, optimizer = small_training(sharded)
    made = Path(folder, ".checkpoint-1.01234567.partial", "checkpoint-1")
    made.mkdir(parents=True, exist_ok=True)
    with background.BackgroundCheckpoints(Path(folder), keep=1) as checkpoints:
        checkpoints.on_train_begin(None, None, None)
        checkpoints.begin(made, model, optimizer)
    return whole_tensors(model, optimizer)


def load(folder, sharded):
    """The tensors of a model that were zeros before."""
    model, optimizer = small_training(sharded)
    with torch.no_grad():
        for x in (*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())):
            x.zero_()
    sharded_checkpoints.load_weights(model, Path(folder, "checkpoint-1"))
    sharded_checkpoints.load_moments(model, optimizer, Path(folder, "checkpoint-1"))
    return whole_tensors(model, optimizer)


@pytest.mark.slow
def test_two_processes_save_for_one_and_one_for_two(tmp_path):
    (tmp_path / "alone").mkdir()
    alone = save(tmp_path / "alone", False)
    assert_equal(load(tmp_path / "alone", False), alone)
    assert_equal(processes(2).run(load, tmp_path / "alone", True)[1], alone)
    for sharded in (True, False):
        folder = tmp_path / f"sharded-{sharded}"
        folder.mkdir()
        saved = processes(2).run(save, folder, sharded)[0]
        assert_equal(load(folder, False), saved)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-1"]
        shards = sorted((folder / "checkpoint-1").rglob("*.safetensors"))
        assert len(shards) == 4 and damage(folder / "checkpoint-1") is None
        content = bytearray(shards[-1].read_bytes())
        content[-1] ^= 1
        shards[-1].write_bytes(content)
        assert (
            damage(folder / "checkpoint-1")
            == "optimizer/shard-00002-of-00002.safetensors has changed since it was written"
        )


@pytest.fixture
def run_file(prepared, tmp_path):
    """A function that writes a run file: the same training, in so many processes."""

    def write(processes=1, output="out", rows=4, **settings):
        settings = {
            "output": str(tmp_path / output),
            "cache": str(prepared / "cache"),
            "batch_size": rows // processes,
            "length": 32,
            "learning_rate": 1e-2,
            "log_every": 1,
            "evaluation_rows": 7,
            "context_lengths": [],
            **settings,
        }
        model = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "gdn"}
        corpus = {"paths": [str(prepared / "texts")], "held_out_fraction": 0.2}
        tables = {"": settings, "[model]": model, "[tokenizer]": {"vocab_size": 300}, "[corpus]": corpus}
        file = tmp_path / "run.toml"
        lines = [
            line
            for head, table in tables.items()
            for line in (
                head,
                *(f"{key} = {str(x).lower() if isinstance(x, bool) else repr(x)}" for key, x in table.items()),
            )
        ]
        file.write_text("\n".join(lines))
        return file

    return write


@pytest.mark.slow
def test_sharded_on_two_then_four_then_not_then_alone(run_file):
    """The losses and moments of a training that is never interrupted."""
    settings = {"max_steps": 6, "evaluate_every": 3, "checkpoint_every": 10}
    whole = load_run(run_file(output="whole", **settings))
    expected = train_language(whole)[0]
    torchrun(FSDP, run_file(2, fsdp=True, **settings), 2, "stop")
    folder = Path(load_run(run_file(**settings)).output, "checkpoints")
    model = load_language_model(folder / "checkpoint-2")[0]  # of two files
    assert len(list((folder / "checkpoint-2").glob("model-*.safetensors"))) == 2
    torchrun(FSDP, run_file(4, fsdp=True, **settings), 3, "stop", processes=4)
    torchrun("-m", "fastweights", "train", run_file(2, **settings), "--stop-at", 4)
    assert train_language(load_run(run_file(**settings)), stop_at=5) is None
    torchrun(FSDP, run_file(2, fsdp=True, **settings))
    run = load_run(run_file(**settings))
    result = load_result(Path(run.output, "result.json"))
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.held_out_losses, expected.held_out_losses, rtol=1e-5, atol=1e-5)
    saved = load_language_model(Path(run.output))[0].state_dict()
    for name, x in load_language_model(Path(whole.output))[0].state_dict().items():
        torch.testing.assert_close(saved[name], x, rtol=1e-4, atol=1e-4)
    assert model.state_dict().keys() == saved.keys()


@pytest.mark.slow
def test_killed_at_any_point_of_a_save(run_file):
    """At most the last interval is lost, and the rest has the bits of a training that was never killed."""
    settings = {"max_steps": 12, "evaluate_every": 7, "checkpoint_every": 2, "fsdp": True}
    torchrun(FSDP, run_file(2, output="whole", **settings))
    whole = load_run(run_file(2, output="whole", **settings))
    file = run_file(2, **settings)
    folder = Path(load_run(file).output, "checkpoints")
    for death, last in enumerate((2, 4, 6, 10)):  # the second save of a start is lost, unless the folder has its name
        torchrun(FSDP.with_name("killed_while_saving.py"), file, death, succeeds=False)
        assert checkpoint_step(checkpoints_in(folder)[-1]) == last
    torchrun(FSDP, file)
    assert log(load_run(file)) == log(whole)
    assert_equal(tensors_of(load_run(file), 12), tensors_of(whole, 12))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10", "checkpoint-12"]
