"""Language models trained at the same time: what each process ended with, and the GPU that it sees."""

import os

import pytest
import torch

from fastweights.layers import import_mixers, registry
from fastweights.training import WorkerError
from fastweights.training.language import together

NOT_FINITE = """
from fastweights.layers import MemoryLayer, register_mixer
from fastweights.ops import linear_attention


@register_mixer("not-finite", summary="values over 0", equation="S + k (v / 0)^T", source="a test", state="H K V")
class NotFinite(MemoryLayer):
    def rule(self, x, q, k, v, run):
        return run(linear_attention, q, k, v / 0, state=("S",))

    def state_size(self, length=1):
        return self.heads.value_heads * self.heads.key * self.heads.value
"""


@pytest.mark.slow
def test_every_run_ends_for_itself(make_run, tmp_path, monkeypatch, capsys):
    """Processes import mixers; a training that diverges and one that fails leave the others alone."""
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    file = tmp_path / "mixers.py"
    file.write_text(NOT_FINITE)
    import_mixers([str(file)])
    one = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "not-finite"}
    runs = [make_run("diverges", model=one), make_run("fails"), make_run("trains", max_steps=2, context_lengths=())]
    diverges, fails, trains = runs
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails" / "photo.jpg").write_text("of another")
    ended = {}
    message = f"1 of 3 trainings failed: {fails.output} (exit code 1)"
    with pytest.raises(WorkerError) as error:
        together.train_together(runs, 2, "cpu", [str(file)], lambda run, why: ended.update({run.output: why}))
    assert str(error.value) == message
    assert ended.pop(trains.output) is None and (tmp_path / "trains" / "result.json").exists()
    assert list(ended) == [diverges.output] and "the loss is nan at step 1" in ended[diverges.output]
    again = together.train_together([diverges, trains], 1, "cpu", [str(file)])
    assert again == {diverges.output}
    assert f"{diverges.output}: the loss is nan at step 1" in capsys.readouterr().err


def test_the_gpus_of_a_device(monkeypatch):
    """Names and numbers of CUDA_VISIBLE_DEVICES stay; without it every GPU of the machine counts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,3")
    assert together._gpus(torch.device("cuda")) == ["GPU-5", "3"]
    assert together._gpus(torch.device("cuda:1")) == ["3"]
    assert together._gpus(torch.device("cpu")) == [None]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert together._gpus(torch.device("cuda")) == ["0", "1"]


@pytest.mark.parametrize("before", [None, "GPU-5,3"])
def test_a_process_sees_its_gpu_alone(monkeypatch, before):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with together._visible("3"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    with together._visible(None):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
