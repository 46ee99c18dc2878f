"""Weights: first values, and what comes back from a checkpoint."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from fastweights.models import FastWeightsForCausalLM, FastWeightsModel

from ..layers.variants import OPTIONS
from .mixers import every_mixer
from .small import HYBRID, config, model, tokens


def bits(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


@every_mixer(HYBRID)
def test_save_and_load(tmp_path, mixer):
    lm, ids = model(mixer), tokens()
    lm.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FastWeightsForCausalLM and not loaded.training
    assert_same(bits(loaded), bits(lm))
    assert torch.equal(loaded(ids).logits, lm(ids).logits)


def test_base_model_loads_from_a_language_models_checkpoint(tmp_path):
    lm, ids = model(HYBRID), tokens()
    lm.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is FastWeightsModel
    assert torch.equal(base(ids).last_hidden_state, lm.model(ids).last_hidden_state)


def test_tied_embeddings(tmp_path):
    lm = model(tie_word_embeddings=True)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    lm.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tokens()).logits, lm(tokens()).logits)
    free = model()
    assert not torch.equal(free.lm_head.weight, free.model.embed_tokens.weight)


def test_saved_in_bfloat16(tmp_path):
    lm = model("pkda").bfloat16()
    lm.save_pretrained(tmp_path)
    assert_same(bits(AutoModelForCausalLM.from_pretrained(tmp_path)), bits(lm))


def test_missing_parameters_are_initialised_and_the_others_kept(tmp_path):
    lm = model("pgdn")
    lm.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    missing = {
        "model.layers.0.mixer.decay.A_log",
        "model.layers.0.mixer.preconditioner.center",
        "model.layers.1.mixer.qkv.k_conv.weight",
        "model.layers.1.mixer.output.o_proj.weight",
    }
    weights = {name: 3 * tensor for name, tensor in load_file(path).items() if name not in missing}
    save_file(weights, path, metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == missing
    after = bits(loaded)
    assert_same({name: tensor for name, tensor in after.items() if name not in missing}, weights)
    rate = after["model.layers.0.mixer.decay.A_log"].exp()
    assert ((rate > 0) & (rate <= 16)).all()
    assert torch.equal(after["model.layers.0.mixer.preconditioner.center"], torch.full((2,), -0.2))
    filters = after["model.layers.1.mixer.qkv.k_conv.weight"]
    assert filters.std() > 0.1 and filters.abs().max() <= 0.5
    assert 0 < after["model.layers.1.mixer.output.o_proj.weight"].std() < 0.05


@pytest.mark.parametrize(
    "plain, full", [("mamba2", "palimpsa-m"), ({"name": "palimpsa-d", "metaplasticity": False}, "palimpsa-d")]
)
def test_a_trained_model_goes_on_with_metaplasticity(tmp_path, plain, full):
    lm = model(plain)
    lm.save_pretrained(tmp_path)
    mixer = {"name": full, "b_scale": -800.0}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, mixer=mixer, output_loading_info=True)
    assert info["missing_keys"] and all(".mixer.importance." in key for key in info["missing_keys"])
    assert torch.equal(loaded.model.layers[0].mixer.importance.b_scale, torch.full((2,), -800.0))
    torch.testing.assert_close(loaded(tokens()).logits, lm(tokens()).logits)


@pytest.mark.parametrize("variant", OPTIONS)
def test_every_first_value_is_known_to_the_model(variant):
    """None is left to chance when a checkpoint is loaded: a module knows its own or is one that transformers knows."""
    name, options = OPTIONS[variant]
    with torch.device("meta"):
        empty = FastWeightsForCausalLM(config({"name": name, **options}, hidden_size=24))
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    empty.init_weights()
    assert [name for name, parameter in empty.named_parameters() if not parameter.isfinite().all()] == []


def test_first_values():
    lm = model("pkda", hidden_size=128, num_hidden_layers=8, initializer_range=0.05)
    mixer, mlp = lm.model.layers[3].mixer, lm.model.layers[3].mlp
    for linear in (mixer.qkv.q_proj, mixer.gain.b_proj, mlp.up_proj, lm.lm_head):
        assert abs(linear.weight.std().item() - 0.05) < 0.01
    for linear in (mixer.output.o_proj, mlp.down_proj):
        assert abs(linear.weight.std().item() - 0.05 / math.sqrt(16)) < 0.001
    assert abs(lm.model.embed_tokens.weight.std().item() - 0.05) < 0.005
    assert abs(mixer.qkv.v_conv.weight.std().item() - 0.5 / math.sqrt(3)) < 0.02
    assert torch.equal(mixer.preconditioner.center, torch.full((2,), -0.2))
    assert not mixer.output.g_proj[1].bias.any()
    step = torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert step.min().item() == pytest.approx(1 / 4096, rel=1e-3) and step.max().item() == pytest.approx(
        1 / 15.5, rel=1e-2
    )
    assert not mixer.decay.A_log.any()


def test_the_seed_decides_the_first_values():
    assert_same(bits(model("pgdn")), bits(model("pgdn")))
    torch.manual_seed(1)
    other = FastWeightsForCausalLM(model("pgdn").config)
    assert not torch.equal(other.lm_head.weight, model("pgdn").lm_head.weight)


def test_building_on_the_meta_device_draws_nothing():
    configuration = model("pgdn").config
    state = torch.get_rng_state()
    with torch.device("meta"):
        FastWeightsForCausalLM(configuration)
    assert torch.equal(torch.get_rng_state(), state)
