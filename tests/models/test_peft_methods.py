"""Every method of the peft library on a model of several mixers: its default targets, training, saving, merging, decoding."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from fastweights.layers import MIXERS
from fastweights.layers import projections as convolutions
from fastweights.models.configuration import LORA_TARGETS

from .small import model, tokens

SEVERAL = ["pkda", "lattice", "mamba2"]  # all names of projections
# Options that a method asks for, and ranks and blocks that are small enough for these layers.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 20}, "BOFT": {"boft_block_size": 2}, "C3A": {"block_size": 2}, "DEFT": {"r": 2}, "DELORA": {"r": 2},
    "FOURIERFT": {"n_frequency": 8}, "FROD": {}, "GLORA": {"r": 2}, "GRALORA": {"r": 2, "gralora_k": 2}, "HIRA": {"r": 2},
    "HRA": {"r": 2}, "IA3": {}, "LILY": {"r": 2}, "LN_TUNING": {}, "LOHA": {"r": 2}, "LOKR": {"r": 2}, "LORA": {"r": 2},
    "MISS": {"r": 2}, "OFT": {"oft_block_size": 2, "r": 0}, "OSF": {}, "PSOFT": {"r": 2}, "PVERA": {"r": 2}, "RANDLORA": {"r": 2},
    "ROAD": {"group_size": 2}, "SHIRA": {"r": 1}, "TINYLORA": {"r": 2}, "VBLORA": {"vector_length": 2, "num_vectors": 8},
    "VERA": {"r": 2}, "WAVEFT": {"n_frequency": 8}, "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
}  # fmt: skip
FAST = {"IA3", "LN_TUNING", "OFT", "PROMPT_TUNING", "VERA"}
UNMERGED = {"LILY", "PROMPT_TUNING", "P_TUNING"}
EMBEDDINGS: dict[str, Any] = {
    "LoRA": peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "v_proj", "in_proj"]),
    "LoRA and head": peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "lm_head"]),
    "DoRA": peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "o_proj"], use_dora=True),
    "token indices": peft.LoraConfig(task_type="CAUSAL_LM", r=2, trainable_token_indices=[1, 5, 7]),
    "trainable tokens": peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[1, 5, 7]),
    "copy": peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["embed_tokens"]),
    "copies": peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["embed_tokens", "lm_head"]),
}
SLOW = {"DoRA", "LoRA and head", "copies", "copy", "token indices"}
# PEFT warns that merging into one weight that two layers share changes both.
MERGED_TIED = {"token indices", "trainable tokens", "copy", "copies"}


def check_adapter(mixers: list[str], config: Any, tmp_path, *, merged: bool = True, **settings: Any) -> None:
    """It trains, and alone; loaded again, merged and without a cache the model answers the same."""
    ids = tokens(2, 9)
    lm = peft.get_peft_model(model(mixers, **settings), config).train()
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    optimizer = torch.optim.Adam([p for p in lm.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = lm(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        assert all(p.grad is None for p in lm.parameters() if not p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    assert min(losses[1:]) < losses[0]
    assert all(p.requires_grad or torch.equal(p, before[name]) for name, p in lm.named_parameters())
    cached, plain = (
        lm.eval().generate(input_ids=ids[:, :6], max_new_tokens=4, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)
    wanted = lm(input_ids=ids).logits.detach()
    lm.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model(mixers, **settings), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-6)
    if merged:
        torch.testing.assert_close(lm.merge_and_unload()(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in OPTIONS]
)
def test_methods_by_their_default_targets(method, tmp_path):
    if not hasattr(peft.PeftType, method):
        pytest.skip(f"this version of peft has no {method}")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]](task_type="CAUSAL_LM", **OPTIONS[method])
    torch.manual_seed(0)
    check_adapter(SEVERAL, config, tmp_path, merged=method not in UNMERGED)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in EMBEDDINGS]
)
def test_adapters_on_the_embedding(name, tied, tmp_path):
    torch.manual_seed(0)
    mergeable = not tied or name in MERGED_TIED
    check_adapter(["gdn"], EMBEDDINGS[name], tmp_path, merged=mergeable, tie_word_embeddings=tied)


@pytest.mark.parametrize("config", [EMBEDDINGS["LoRA"], EMBEDDINGS["trainable tokens"]], ids=["LoRA", "tokens"])
def test_ids_are_checked_behind_an_adapter(config):
    base = model("gdn")
    base.resize_token_embeddings(40)
    lm = peft.get_peft_model(base, config).eval()
    lm(input_ids=torch.tensor([[39]]))
    for call in (lm, lm.generate):
        with pytest.raises(ValueError, match="input_ids must be from 0 to 39, the model's vocabulary, got 40 to 40"):
            call(input_ids=torch.tensor([[40]]))


def test_every_table_of_peft_is_filled():
    model("gdn").config.to_dict()
    tables = {
        name: table["fastweights"]
        for name, table in vars(peft.utils.constants).items()
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict)
    }
    assert len(tables) >= 10
    assert tables["TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING"] == ["down_proj"]
    assert "mixer_norm" in tables["TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING"]
    assert tables["TRANSFORMERS_MODELS_TO_VERA_TARGET_MODULES_MAPPING"] == list(LORA_TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["IA3", "LN_TUNING", "GLORA"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_default_targets_of_every_mixer(mixer, method):
    """Those of the methods with targets of their own: each layer has some beside its MLP."""
    if not hasattr(peft.PeftType, method):
        pytest.skip(f"this version of peft has no {method}")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]](task_type="CAUSAL_LM", **OPTIONS[method])
    lm = peft.get_peft_model(model(mixer, num_hidden_layers=1), config)
    learning = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert any(".mixer" in name for name in learning)


@pytest.mark.parametrize("method", ["PREFIX_TUNING", "CARTRIDGE"])
def test_prefixes_of_keys_and_values_are_refused(method):
    if not hasattr(peft.PeftType, method):
        pytest.skip(f"this version of peft has no {method}")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]](task_type="CAUSAL_LM", num_virtual_tokens=3)
    lm, ids = peft.get_peft_model(model("gdn"), config), tokens()
    for call in (lambda: lm(input_ids=ids, labels=ids), lambda: lm.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(
            TypeError, match="past_key_values must be .* prefix tuning and cartridges do not fit, take prompt"
        ):
            call()


def with_virtual_tokens() -> Any:
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model(SEVERAL), config).eval()


def generated(lm: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits [new tokens, B, vocab_size]: greedy tokens of an untrained model hardly depend on those before the last."""
    shown = lm.generate(
        input_ids=ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(shown.logits)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=["default", "blocks of 4"])
def test_long_prompts_after_virtual_tokens(options, monkeypatch):
    monkeypatch.setattr("fastweights.models.prompts.CPU_BLOCK", 4)
    lm, ids = with_virtual_tokens(), tokens(2, 9)
    wanted = generated(lm, ids, use_cache=False)
    torch.testing.assert_close(generated(lm, ids, **options), wanted, rtol=1e-4, atol=1e-5)
    blocks: list[int] = []
    lm.base_model.register_forward_pre_hook(
        lambda module, args, given: blocks.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    generated(lm.base_model, ids, **options)
    assert blocks[:3] == [4, 4, 1]  # the model alone, which PEFT gives back, reads in blocks


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_prompts_after_virtual_tokens(side, use_cache):
    lm, ids, mask = with_virtual_tokens(), tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    kept = slice(3, 9) if side == "left" else slice(0, 6)
    mask[1] = 0
    mask[1, kept] = 1
    logits = generated(lm, ids, attention_mask=mask, use_cache=use_cache)
    alone = generated(lm, ids[1:, kept], use_cache=False)
    torch.testing.assert_close(logits[:, 1:], alone, rtol=1e-4, atol=1e-5)


def test_adapters_on_short_convolutions(tmp_path, monkeypatch):
    """PEFT refuses the module and takes its parameter. A step of decoding must not read the weight past the adapter."""
    with pytest.raises(ValueError, match="Target module ShortConvolution.* is not supported"):
        peft.get_peft_model(model("gdn"), peft.LoraConfig(r=2, target_modules=["q_conv"]))
    filters = ["q_conv.weight", "k_conv.weight", "v_conv.weight", "conv.weight"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "in_proj"], target_parameters=filters
    )
    monkeypatch.setattr(convolutions, "takes_token", lambda *given: True)
    monkeypatch.setattr(convolutions, "convolve_token", lambda *given, **more: pytest.fail("read past the adapter"))
    lm = peft.get_peft_model(model(["gdn", "mamba2"]), config)
    assert sum("conv.lora_A" in name for name, _ in lm.named_parameters()) == 4
    ids = tokens(2, 9)
    lm(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in lm.parameters() if p.requires_grad], lr=1.0).step()
    cached, plain = (
        lm.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False, use_cache=u) for u in (True, False)
    )
    assert torch.equal(cached, plain)
    monkeypatch.undo()
    wanted = lm(input_ids=ids).logits
    torch.testing.assert_close(lm.merge_and_unload()(ids).logits, wanted, rtol=1e-4, atol=1e-5)


SOME_PARTS = [
    *(("pkda", "f_proj"), ("pgla", "gk_proj"), ("pgdn", "gates"), ("mesa", "ridge"), ("comba", "feedback")),
    *(("palimpsa-d", "skip"), ("gdn", "output.norm"), ("gdn", "mixer_norm"), ("lattice", "step"), ("mamba2", "conv")),
]


@pytest.mark.parametrize(("mixer", "part"), SOME_PARTS)
def test_parts_are_trained_as_copies(mixer, part):
    check_copy(model(mixer, num_hidden_layers=1), part)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_part_is_trained_as_a_copy(mixer):
    block = model(mixer, num_hidden_layers=1).model.layers[0]
    for part in sorted(
        name for name, module in block.named_modules() if name and any(True for _ in module.parameters())
    ):
        check_copy(model(mixer, num_hidden_layers=1), part)


def check_copy(lm: Any, part: str) -> None:
    """modules_to_save: PEFT wraps the module and trains a copy of it, which gives what the module gave."""
    lm, ids = lm.double(), tokens(2, 7)
    wanted, size = lm(ids).logits, lm.state_size(5)
    adapted = peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=[part], target_modules=["lm_head"])
    lm = peft.get_peft_model(lm, adapted)
    torch.testing.assert_close(lm.eval()(input_ids=ids).logits, wanted)
    assert lm.base_model.model.state_size(5) == size
    lm.train()(input_ids=ids, labels=ids).loss.backward()
    copies = [p for name, p in lm.named_parameters() if "modules_to_save" in name]
    assert copies and all(p.grad is not None and p.grad.abs().sum() > 0 for p in copies)
