"""What happens in versions of other libraries that have lost a private name."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastweights import private_huggingface, private_torch
from fastweights.layers.wrapped import is_bare


class Renamed:
    """A library's module or object that has none of the names."""

    __version__ = "99"


def test_an_op_names_the_versions_that_have_the_dispatcher_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_C", Renamed())
    with pytest.raises(RuntimeError, match="torch that was tested, 2.11 to 2.13"), private_torch.autograd_inside_op():
        pass


def test_compilation_goes_on_without_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=SimpleNamespace()))
    private_torch.allow_compilations(9)
    private_torch.size_may_change(torch.zeros(2), 0)


def test_compilations_are_only_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(recompile_limit=8)
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=config))
    private_torch.allow_compilations(3)
    assert config.recompile_limit == 8
    private_torch.allow_compilations(20)
    assert config.recompile_limit == 20


def test_a_module_that_does_not_tell_its_hooks_is_called() -> None:
    layer = nn.Linear(2, 2)
    assert is_bare(layer, nn.Linear) and private_torch.count_forward_hooks(layer) == 0
    layer.register_forward_hook(lambda *given: None)
    assert not is_bare(layer, nn.Linear) and private_torch.count_forward_hooks(layer) == 1
    untold: Any = Renamed()
    assert private_torch.has_hooks(untold) and private_torch.count_forward_hooks(untold) > 1


def test_a_tensor_that_does_not_tell_its_changes() -> None:
    x = torch.zeros(2)
    before = private_torch.change_count(x)
    assert before is not None and private_torch.change_count(x.add_(1)) == before + 1
    untold: Any = Renamed()
    assert private_torch.change_count(untold) is None


def test_a_trainer_without_the_methods_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = type("Trainer", (), {"get_decay_parameter_names": lambda self, model: []})
    module: Any = types.ModuleType("transformers.trainer")
    module.Trainer, before = trainer, dict(vars(trainer))
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    with pytest.warns(
        UserWarning, match="transformers must be 5.6 to 5.24: in this version Trainer alone counts labels"
    ):
        private_huggingface.adapt_trainer(lambda model, batches: None, lambda model: ())
    assert dict(vars(trainer)) == before


def test_several_gpus_are_refused() -> None:
    several = SimpleNamespace(device="cuda", n_gpu=4)
    with pytest.raises(RuntimeError, match="splits a batch over 4 GPUs; set CUDA_VISIBLE_DEVICES"):
        private_huggingface.use_one_gpu(several)


def test_peft_without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    constants: Any = types.ModuleType("peft.utils.constants")
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING = table = {}
    constants.TRANSFORMERS_MODELS_TO_OTHER_MODULES_MAPPING = ()
    monkeypatch.setitem(sys.modules, "peft.utils.constants", constants)
    private_huggingface.add_adapter_targets("ours", {"OTHER": ("a",)}, others=("b",))
    assert table == {"ours": ["b"]}


def test_a_dataset_without_a_fingerprint_is_new_each_time() -> None:
    dataset = SimpleNamespace(_fingerprint="abc")
    assert private_huggingface.dataset_fingerprint(dataset) == "abc"
    assert private_huggingface.dataset_fingerprint(Renamed()) != private_huggingface.dataset_fingerprint(Renamed())
