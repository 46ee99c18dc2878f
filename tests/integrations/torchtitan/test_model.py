"""The pieces of the bundle by themselves: documents, weight decay, counts, names."""

from __future__ import annotations

import torch
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC

from fastweights.integrations.torchtitan import model_registry
from fastweights.integrations.torchtitan.model import document_edges
from fastweights.integrations.torchtitan.spec import spare_from_weight_decay
from fastweights.integrations.torchtitan.trainer import FastWeightsTrainer
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.optimization import weight_decay_groups

from .configs import LENGTH, architecture, made_up_row


def test_positions_become_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    assert document_edges(positions).tolist() == [0, 3, 5, 6, 10]
    assert document_edges(torch.arange(4)[None]).tolist() == [0, 4, 4]  # and an empty one, for torch.compile
    assert document_edges(torch.arange(3).expand(2, -1)).tolist() == [0, 3, 6]


def test_logits_are_those_of_the_model() -> None:
    spec = model_registry(architecture())
    ours, theirs = FastWeightsForCausalLM(architecture()), spec.model.build()
    theirs.load_state_dict(ours.state_dict())
    tokens, _, positions = (torch.stack(x) for x in zip(*(made_up_row(number, LENGTH) for number in range(3))))
    torch.testing.assert_close(theirs(tokens, positions), ours(tokens, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(theirs(tokens), ours(tokens, use_cache=False).logits)


def test_norms_and_decays_get_no_weight_decay() -> None:
    model = model_registry(architecture(mixer="pgdn")).model.build()
    optimizers = default_adamw(lr=1e-3, weight_decay=0.3).build(model_parts=[model])
    before = set(optimizers.optimizers[0].param_groups[0]["param_names"])
    spare_from_weight_decay(optimizers, [model], None)
    names = {id(x): name for name, x in model.named_parameters()}
    wanted = {g["weight_decay"]: {names[id(x)] for x in g["params"]} for g in weight_decay_groups(model, 0.3)}
    (optimizer,) = optimizers
    assert {g["weight_decay"]: set(g["param_names"]) for g in optimizer.param_groups} == wanted
    assert all([names[id(x)] for x in g["params"]] == g["param_names"] for g in optimizer.param_groups)
    assert wanted[0.3] | wanted[0.0] == before and "model.layers.0.mixer.decay.A_log" in wanted[0.0]
    assert set(optimizers.state_dict()) >= {f"state.{name}.exp_avg" for name in before}


def test_presets_are_flavors() -> None:
    spec = model_registry("gdn-340m")
    with torch.device("meta"):
        model = spec.model.build()
    count, operations = spec.model.get_nparams_and_flops(model, 2048)
    assert spec.flavor == "gdn-340m" and count == model.model.num_parameters() + model.lm_head.weight.numel()
    assert 6 * (count - model.tok_embeddings.weight.numel()) * 0.99 < operations < 6 * count


def test_the_command_line_names_presets_and_changes_settings() -> None:
    command = (
        "--module fastweights.integrations.torchtitan --config gdn_340m --training.steps 5 activation_checkpoint:full"
    )
    config = ConfigManager().parse_args(command.split())
    assert (config.model_spec.flavor, config.training.steps, config.training.seq_len) == ("gdn-340m", 5, 2048)
    assert isinstance(config, FastWeightsTrainer.Config) and isinstance(config.activation_checkpoint, FullAC.Config)
