"""Parameters that weight decay leaves alone, by our own groups and by transformers' Trainer; and their marks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from fastweights.layers import MIXERS
from fastweights.training import WeightDecayMixin, undecayed_parameters, weight_decay_groups
from fastweights.training.language.trainer import LanguageTrainer
from tests.models.small import model

EVERY = list(MIXERS)  # one model with a layer of each
MARKED = {
    "A_log",
    "dt_bias",
    "D",
    "b_scale",
    "log_rate",
    "center",
    "share",
    "correction",
    "erase",
    "mix",
    "base",
    "rho",
}  # and the ridge of mesa


class OwnTrainer(WeightDecayMixin, Trainer):
    pass


def decayed_by(trainer: type[Trainer], lm: Any, folder: Any) -> set[str]:
    """Names of the parameters that an optimizer of the trainer decays."""
    arguments = TrainingArguments(output_dir=str(folder), weight_decay=0.1, use_cpu=True, report_to=[])
    optimizer = trainer(model=lm, args=arguments).create_optimizer()
    return names_in(lm, [group for group in optimizer.param_groups if group["weight_decay"]])


def names_in(lm: Any, groups: list[dict[str, Any]]) -> set[str]:
    found = {id(parameter) for group in groups for parameter in group["params"]}
    return {name for name, parameter in lm.named_parameters() if id(parameter) in found}


def marked(lm: Any) -> set[str]:
    return {name for name, parameter in lm.named_parameters() if getattr(parameter, "_no_weight_decay", False)}


def test_the_parameters_of_every_mixer_that_do_not_decay():
    lm = model(EVERY)
    names = undecayed_parameters(lm)
    assert marked(lm) == names
    assert {name.split(".")[-1] for name in names} == {*MARKED, "weight"}
    assert all(name.endswith("mixer.ridge.weight") for name in names if name.endswith("weight"))
    assert {name for name, _ in lm.named_parameters() if name.split(".")[-1] in MARKED} <= names


@pytest.mark.parametrize("trainer", (Trainer, OwnTrainer))
def test_transformers_trainer_decays_what_our_groups_decay(trainer, tmp_path):
    lm = model(EVERY)
    decayed = decayed_by(trainer, lm, tmp_path)
    assert decayed == names_in(lm, weight_decay_groups(lm, 0.1)[:1])
    assert not decayed & undecayed_parameters(lm)
    assert {"lm_head.weight", "model.embed_tokens.weight"} < decayed


class OwnModule(torch.nn.Module):
    """A model of somebody else, with Mamba's mark, which transformers' Trainer does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2, 2))
        self.A_log._no_weight_decay = True


def test_transformers_trainer_is_the_same_for_other_models(tmp_path):
    decayed_by(Trainer, model(["gdn"]), tmp_path)
    assert decayed_by(Trainer, OwnModule(), tmp_path) == {"A_log"}
    assert decayed_by(OwnTrainer, OwnModule(), tmp_path) == set()


def test_a_model_with_another_head_is_trained_alike(tmp_path):
    config = model(["gdn"]).config
    lm = AutoModelForSequenceClassification.from_config(config)
    assert undecayed_parameters(lm) and not decayed_by(Trainer, lm, tmp_path) & undecayed_parameters(lm)


def test_the_hook_is_that_of_language_training():
    assert LanguageTrainer.get_decay_parameter_names is WeightDecayMixin.get_decay_parameter_names


def test_copies_in_an_adapter(tmp_path):
    lm = peft.get_peft_model(model(["gdn", "comba"]), peft.LoraConfig(r=2, modules_to_save=["decay", "feedback"]))
    kept = undecayed_parameters(lm)
    assert {name.split(".")[-1] for name in kept if "modules_to_save" in name} == {
        "A_log",
        "dt_bias",
        "share",
        "correction",
    }
    assert not decayed_by(OwnTrainer, lm, tmp_path) & kept


def saved(lm: Any, folder: Any, **settings: Any) -> Any:
    lm.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def resized(lm: Any, folder: Any) -> Any:
    lm.resize_token_embeddings(40)
    return lm


def assigned(lm: Any, folder: Any) -> Any:
    lm.load_state_dict({name: x.clone() for name, x in lm.state_dict().items()}, assign=True)
    return lm


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "dtype": lambda lm, folder: lm.to(torch.bfloat16),
    "device": lambda lm, folder: lm.to("meta").to_empty(device="cpu"),
    "copied": lambda lm, folder: copy.deepcopy(lm),
    "pickled": lambda lm, folder: pickle.loads(pickle.dumps(lm)),
    "loaded": saved,
    "loaded in bfloat16": lambda lm, folder: saved(lm, folder, dtype=torch.bfloat16),
    "resized": resized,
    "assigned": assigned,
}


@pytest.mark.parametrize("change", CHANGES)
def test_marks_stay(change, tmp_path):
    lm = model(["pgdn", "comba", "mamba2", "mesa", "palimpsa-d", "lattice"])
    wanted = marked(lm)
    changed = CHANGES[change](lm, tmp_path)
    assert wanted and marked(changed) == undecayed_parameters(changed) == wanted


def test_marks_of_others_are_read():
    """Mamba's convention: a mark on the parameter, without a name in its module."""
    own = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    own[1].weight._no_weight_decay = True
    assert undecayed_parameters(own) == {"1.weight"}
    decayed, _ = weight_decay_groups(own, 0.1)
    assert [list(p.shape) for p in decayed["params"]] == [[3, 2]]
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got 'gdn'"):
        undecayed_parameters("gdn")  # type: ignore[arg-type]
