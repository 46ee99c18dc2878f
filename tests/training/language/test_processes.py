"""Several processes through torchrun: the same losses as one process with the batch of all of them."""

import dataclasses
import signal
import time
from pathlib import Path

import filelock
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.results.language import load_result
from fastweights.training.language import load_run, train_language
from fastweights.training.language.schedule import BatchStage

from .launching import torchrun
from .small import assert_same_losses, log

pytestmark = pytest.mark.usefixtures("signals_arrive")

COMPILED = "===== __compiled_fn"  # in the log of every graph that torch compiles


@pytest.fixture
def alone(run_file, tmp_path):
    """The run in one process, with the batch of two."""
    run = load_run(run_file, output=str(tmp_path / "alone"), batch_size=2)
    return train_language(run)[0]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", '"blocks"', "true"])
def test_two_processes_are_one_with_twice_the_batch(run_file, alone, compiled):
    run_file.write_text(f"compile = {compiled}\n" + run_file.read_text())
    errors = torchrun("-m", "fastweights", "train", run_file, "--stop-at", 4)
    assert "stopped after step 4" in errors
    assert errors.count(COMPILED) == (0 if compiled == "false" else 2) and "Recompiling" not in errors
    assert compiled == "false" or any(Path(load_run(run_file).cache).glob("compiled-*/*"))
    assert errors.count("gdn: 2 processes x 1 row x 2 passes x 32 tokens = 128 tokens per step") == 1
    result = train_language(load_run(run_file, batch_size=2))[0]  # one process continues the training of two
    assert_same_losses(result, alone)
    assert log(load_run(run_file))[-1]["tokens"] == alone.tokens


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["one process", "launcher"])
def test_a_signal_to_one_process_stops_all_at_the_same_step(run_file, receiver):
    run_file.write_text(run_file.read_text().replace("max_steps = 6", "max_steps = 300").replace("= 4", "= 1000"))
    run = load_run(run_file)

    def terminate(process):
        until = time.monotonic() + 120
        while not Path(run.output, "log.jsonl").exists() or len(log(run)) < 5:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children(recursive=True)}
        (process if receiver == "launcher" else ranks["1"]).send_signal(signal.SIGTERM)

    errors = torchrun("-m", "fastweights", "train", run_file, succeeds=False, while_running=terminate)
    (checkpoint,) = Path(run.output, "checkpoints").iterdir()
    step = checkpoint.name.removeprefix("checkpoint-")
    assert errors.count("SIGTERM: stopped after step") == 1 and f"after step {step}, which is saved" in errors
    assert "fastweights: error: stopped by SIGTERM; the same command continues" in errors
    last = int(step) + 2
    assert train_language(load_run(run_file, batch_size=2), stop_at=last) is None
    assert [point["step"] for point in log(run) if "loss" in point] == list(range(1, last + 1))


@pytest.mark.slow
def test_a_folder_that_is_refused_is_reported_once(run_file, tmp_path):
    (tmp_path / "out").mkdir()
    with filelock.FileLock(tmp_path / "out" / ".lock"):
        errors = torchrun("-m", "fastweights", "train", run_file, succeeds=False)
    assert errors.count("fastweights: error: ") == errors.count("fastweights: error: output") == 1
    assert "is in use by another process" in errors and "gloo" not in errors.lower()


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["false", "true"])
def test_sharded_processes_compute_in_bfloat16_what_autocast_does(run_file, tmp_path, tied):
    """The losses of one process under autocast, up to the rounding of parameters that autocast leaves in float32."""
    text = run_file.read_text().replace("[model]", f"[model]\ntie_word_embeddings = {tied}")
    run_file.write_text('precision = "bf16"\n' + text)
    wanted = train_language(load_run(run_file, output=str(tmp_path / "alone"), batch_size=2))[0]
    run_file.write_text("fsdp = true\n" + run_file.read_text())
    torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
    found = load_result(Path(load_run(run_file).output, "result.json"))
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.held_out_losses, wanted.held_out_losses, rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_replayed_steps_train_the_parameters_that_processes_share(run_file, tmp_path, fsdp):
    """FSDP2 puts others in the place of the model's first ones, before the first step."""
    text = f"fsdp = {fsdp}\n" + run_file.read_text().replace("= 6", "= 20").replace("accumulation = 2\n", "")
    run_file.write_text(text)
    run = load_run(run_file)
    alone = train_language(dataclasses.replace(run, fsdp=False, output=str(tmp_path / "alone"), batch_size=2))[0]
    errors = torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 16, "replayed")
    assert errors.count("captured: 0") == 0 and errors.count("captured: ") == 2
    assert_same_losses(load_result(Path(run.output, "result.json")), alone)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_sums_of_gradients_in_bfloat16(run_file, tmp_path, fsdp):
    """They round: losses are near those of sums in float32, and not the same."""
    text = f'fsdp = {fsdp}\nprecision = "bf16"\n' + run_file.read_text()
    losses = {}
    for dtype in ("float32", "bfloat16"):
        output = tmp_path / dtype
        run_file.write_text(f'reduce_dtype = "{dtype}"\n' + text.replace(f"{tmp_path / 'out'}", f"{output}"))
        torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
        losses[dtype] = load_result(output / "result.json").losses
    torch.testing.assert_close(losses["bfloat16"], losses["float32"], rtol=1e-2, atol=0)
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "order"),
    [
        # Gathers (g) of embedding, block, output layer; block (b), loss (l), and gathers of block and embedding for the backward.
        ("compile = false", "ggbglgg"),
        ("reshard_after_forward = false", "ggbgl"),
        ("forward_prefetch = 1", "gggblgg"),
        ('compile = "blocks"', ""),
        ('compile = "blocks"\nreshard_after_forward = false\nforward_prefetch = 2', ""),
    ],
)
def test_sharded_processes_are_one_with_twice_the_batch(run_file, alone, settings, order):
    run_file.write_text(f"fsdp = true\n{settings}\n" + run_file.read_text())
    run = load_run(run_file)
    errors = torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
    # Each of two processes compiles once to step 4, and once for what comes after.
    assert errors.count(COMPILED) == (4 if "blocks" in settings else 0) and "Recompiling" not in errors
    assert errors.count(f"order: {order * run.accumulation}") == 2
    assert_same_losses(load_result(Path(run.output, "result.json")), alone)
    saved, whole = (AutoModelForCausalLM.from_pretrained(Path(f, "model")) for f in (run.output, alone.folder + "/.."))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-4)
    unsharded = dataclasses.replace(run, fsdp=False, reshard_after_forward=True, forward_prefetch=0, batch_size=2)
    assert train_language(unsharded) == [
        load_result(Path(run.output, "result.json"))
    ]  # the same training, which has ended


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_checkpointed_blocks_are_compiled_once_for_any_number_of_documents(run_file, tmp_path, fsdp):
    settings = 'compile = "blocks"\ngradient_checkpointing = true'
    text = run_file.read_text().replace("batch_size = 1", "batch_size = 2")  # with 2 to 5 documents in a packed row
    run_file.write_text(f"fsdp = {fsdp}\n{settings}\n{text}")
    run = load_run(run_file)
    errors = torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
    assert errors.count(COMPILED) == 4 and "Recompiling" not in errors
    plain = {"fsdp": False, "compile": False, "gradient_checkpointing": False, "output": str(tmp_path / "alone")}
    wanted = train_language(dataclasses.replace(run, **plain, batch_size=4))[0]
    assert_same_losses(load_result(Path(run.output, "result.json")), wanted)


STAGES = """
[[batch_ramp]]
batch_size = 1
steps = 2
[[stages]]
max_steps = 5
[[stages]]
max_steps = 6
length = 64
keep_optimizer = true
"""


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_ramps_and_stages_in_two_processes_are_those_of_one(run_file, tmp_path, fsdp):
    text = run_file.read_text().replace("batch_size = 1", "batch_size = 2")
    run_file.write_text(f"fsdp = {fsdp}\n{text}{STAGES}")
    alone = {"fsdp": False, "batch_size": 4, "batch_ramp": (BatchStage(batch_size=2, steps=2),)}
    wanted = train_language(load_run(run_file, output=str(tmp_path / "alone"), **alone))
    torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
    for stage, expected in zip(("stage1", "stage2"), wanted, strict=True):
        found = load_result(Path(load_run(run_file).output, stage, "result.json"))
        assert_same_losses(found, expected)
        assert found.loss_tokens == expected.loss_tokens


def test_sharding_needs_gpus(run_file):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="fsdp needs several processes with a GPU each, got 1"):
        train_language(load_run(run_file, fsdp=True))
