"""Steps of generate() with joined kernels around the memories (on a GPU or in Triton's interpreter), against the modules one by
one."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from fastweights.kernels import availability
from fastweights.models import decoding, generation
from fastweights.ops import l2_normalize, linear_rows, residual_norm, ring_attention, silu_product, step_decay
from fastweights.ops.short_convolution import token
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE

from .small import CLOSE, model, tokens

pytestmark = pytest.mark.kernels
JOINED = (l2_normalize, linear_rows, residual_norm, ring_attention, silu_product, step_decay, token)
STEPS = 2


def use(backend, monkeypatch):
    """Ops that are asked for backend "auto" take this one."""
    for module in JOINED:
        name = "takes_rows" if module in (l2_normalize, residual_norm) else "takes_kernels"
        takes = getattr(availability, name)
        monkeypatch.setattr(module, name, lambda asked, x, takes=takes: takes(backend, x))


@pytest.fixture
def calls(monkeypatch):
    """How often each of the joined kernels was called in the last step."""
    counted: Counter[str] = Counter()

    def count(function, name):
        def counting(*given, **options):
            counted[name] += 1
            return function(*given, **options)

        return counting

    from fastweights.kernels.attention import ring
    from fastweights.kernels.pointwise import l2_normalize as lengths
    from fastweights.kernels.pointwise import layer_norm
    from fastweights.kernels.pointwise import linear_rows as rows
    from fastweights.kernels.pointwise import residual_norm as norm
    from fastweights.kernels.pointwise import step_decay as steps
    from fastweights.kernels.pointwise import token_convolution as convolution

    places = [
        (ring, "attend"),
        (rows, "multiply_rows"),
        (norm, "forward"),
        (convolution, "convolve_token"),
        (steps, "step_decay"),
        (lengths, "l2_normalize"),
        (layer_norm, "layer_norm"),
    ]
    for module, name in places:
        short = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, name, count(getattr(module, name), short))
    step = decoding.DecodeSteps._step

    def counted_step(self, *given, **options):
        counted.clear()
        step(self, *given, **options)

    monkeypatch.setattr(decoding.DecodeSteps, "_step", counted_step)
    return counted


def generated(monkeypatch, lm, joined, **options):
    """generate() by steps that are not captured."""
    backend = "triton" if joined else "torch"
    use(backend, monkeypatch)
    monkeypatch.setattr(decoding, "FEWEST", 1)
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    return lm.generate(
        tokens(2, 9).to(DEVICE), max_new_tokens=STEPS + 1, return_dict_in_generate=True, output_logits=True, **options
    )


# Launches per step in a layer and its MLP; linear maps are all projections of the norm with their gates, second projections of
# gates, the output's projection, and both halves of the MLP.
MIXERS = {
    "gdn": {"linear_rows": 4, "token_convolution": 1},
    "kda": {"linear_rows": 6, "token_convolution": 1},
    "softmax": {"linear_rows": 4, "ring": 1},
    "lattice": {"linear_rows": 4, "token_convolution": 1, "l2_normalize": 1},
    "mamba2": {"linear_rows": 4, "token_convolution": 1, "step_decay": 1},
    "vla": {"linear_rows": 4, "l2_normalize": 1},
}


# Its layer has most of the kernels.
@fast_where(lambda given: given["mixer"] == "lattice")
@pytest.mark.parametrize("mixer", [*MIXERS, {"name": "softmax", "window": 5, "qk_norm": True}], ids=str)
def test_the_same_tokens(monkeypatch, calls, mixer):
    lm = model([mixer], initializer_range=0.1).to(DEVICE)
    apart = generated(monkeypatch, lm, False, do_sample=False)
    assert not calls
    joined = generated(monkeypatch, lm, True, do_sample=False)
    assert torch.equal(apart.sequences, joined.sequences)
    torch.testing.assert_close(torch.stack(joined.logits), torch.stack(apart.logits), **CLOSE)
    for one, other in zip(apart.past_key_values.layers, joined.past_key_values.layers, strict=True):
        for held, kept in ((one.memory, other.memory), (one.context, other.context)):
            for name, x in held.items():
                torch.testing.assert_close(kept[name], x, **CLOSE)
    assert calls == {
        "residual_norm": 1,
        **MIXERS[mixer if isinstance(mixer, str) else "softmax"],
    }  # before the output layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer, names",
    [
        (
            "gdn",
            ("mixer.qkv.k_proj", "mixer.qkv.v_conv", "mixer.gain.b_proj", "mlp.down_proj", "mixer_norm", "mlp_norm"),
        ),
        ("vla", ("mixer.norm", "mixer.o_proj")),
    ],
    ids=["gdn", "vla"],
)
def test_a_module_that_does_more_than_multiply_is_called(monkeypatch, calls, mixer, names):
    """Hooks, as adapters, tracers and accelerate have them: the module is called in every step."""
    lm = model([mixer]).to(DEVICE)
    (block,) = lm.model.layers
    seen: Counter[str] = Counter()
    for name in names:
        block.get_submodule(name).register_forward_pre_hook(lambda *given, name=name: seen.update([name]))
    generated(monkeypatch, lm, True, do_sample=False)
    assert seen == dict.fromkeys(names, STEPS + 2)  # the prompt, and the step before a capture


def test_training_steps_take_the_joined_norm_and_product(monkeypatch):
    """The same loss and gradients as by PyTorch."""
    lm, ids = model("gdn").to(DEVICE).train(), tokens(2, 9).to(DEVICE)
    found = []
    for backend in ("torch", "triton"):
        use(backend, monkeypatch)
        loss = lm(ids, labels=ids).loss
        found.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
