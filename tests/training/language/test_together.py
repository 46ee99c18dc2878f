"""Language models trained at the same time: what each process ended with."""

import pytest

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
    message = f"training {fails.output} failed: ValueError: output must be a new or empty folder"
    with pytest.raises(WorkerError) as error:
        together.train_together(runs, 2, "cpu", [str(file)], lambda run, why: ended.update({run.output: why}))
    assert str(error.value).startswith(message) and "Traceback" in error.value.details
    assert ended.pop(trains.output) is None and (tmp_path / "trains" / "result.json").exists()
    assert list(ended) == [diverges.output] and "the loss is nan at step 1" in ended[diverges.output]
    again = together.train_together([diverges, trains], 1, "cpu", [str(file)])
    assert again == {diverges.output}
    assert f"{diverges.output}: the loss is nan at step 1" in capsys.readouterr().err
