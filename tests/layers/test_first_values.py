"""First values as the papers and their released code have them: decays that ramp over the heads, filters, beta's projection."""

import math

import pytest
import torch

from fastweights.layers import build_mixer
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training import RecallExperiment, train_run

HIDDEN, HEADS = 64, 8
# By hand: A rises evenly from 0.01 to 0.16, dt runs through the powers of ten from the first exponent to the last.
RATES = [0.01 + 0.15 * h / 7 for h in range(HEADS)]
STEPS = {
    "paper": [10 ** (-3 + 2 * h / 7) for h in range(HEADS)],
    "release": [10 ** (-1 - 2 * h / 7) for h in range(HEADS)],
}
HEAD = ["gdn", "mamba2", "palimpsa-m", "palimpsa-d", "pmamba2", "pgdn", "gka", "mesa", "lattice"]
CHANNEL = ["kda", "pkda", "gla", "pgla"]
OWN = ["gla", "pgla"]  # whose decay is that of a paper
BY_DEFAULT = [
    *HEAD,
    *[n for n in CHANNEL if n not in OWN],
    "pmamba2-tied",
    "pmamba2-key",
    "comba",
    "gated-deltaproduct",
]


def first_log_decays(name, **options):
    """g [heads, 1 or K] of an input of zeros, where the projections of the decay give 0."""
    layer = build_mixer(name, hidden_size=HIDDEN, num_heads=HEADS, **options).double()
    x = torch.zeros(1, 1, HIDDEN, dtype=torch.float64)
    if name in ("mamba2", "palimpsa-m"):
        return layer.decay(torch.zeros(1, 1, HEADS, dtype=torch.float64))[1].view(HEADS, 1)
    decay = layer.decay(x).view(HEADS, -1)
    return decay.log() if name == "lattice" else decay  # it takes exp(g)


@pytest.mark.parametrize("pairing", STEPS)
@pytest.mark.parametrize("name", [*HEAD, *CHANNEL])
def test_long_memory_ramps_over_the_heads(name, pairing):
    g = first_log_decays(name, long_memory=pairing)
    assert g.shape == (HEADS, HIDDEN // HEADS if name in CHANNEL else 1)
    wanted = torch.tensor([-rate * step for rate, step in zip(RATES, STEPS[pairing], strict=True)], dtype=torch.float64)
    torch.testing.assert_close(g, wanted[:, None].expand_as(g), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("pairing", "windows"), [("paper", (63, 100001)), ("release", (615, 6251))])
def test_first_windows_are_those_of_the_paper_and_of_the_release(pairing, windows):
    window = 1 / (1 - first_log_decays("palimpsa-d", long_memory=pairing).detach().exp())
    assert (window.min().item(), window.max().item()) == pytest.approx(windows, rel=2e-3)


@pytest.mark.parametrize(
    "name, options",
    [*((name, {}) for name in BY_DEFAULT), *((name, {"long_memory": "windows"}) for name in (*BY_DEFAULT, *OWN))],
)
def test_windows_rise_from_16_to_4096_tokens_in_equal_ratios(name, options):
    window = 1 / (1 - first_log_decays(name, **options).detach().exp())
    wanted = 16.0 * (4096 / 16) ** (torch.arange(HEADS, dtype=torch.float64) / (HEADS - 1))
    torch.testing.assert_close(window, wanted[:, None].expand_as(window), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", OWN)
def test_first_windows_of_gla_are_those_of_its_equation(name):
    """In a model, where the biases begin at 0: logsigmoid(0) / 16 is a decay of 2^(-1/16), with nothing drawn."""
    for options in ({}, {"long_memory": "own"}):
        decay = model({"name": name, **options}).model.layers[0].mixer.decay
        window = 1 / (1 - decay(torch.zeros(1, 1, 128)).exp())
        torch.testing.assert_close(window, torch.full_like(window, 1 / (1 - 2 ** (-1 / 16))), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_own_first_decays_are_drawn_and_the_default_is_not(name):
    own = [first_log_decays(name, long_memory="own") for _ in range(2)]
    usual = [first_log_decays(name) for _ in range(2)]
    assert not torch.equal(*own) and torch.equal(*usual)


def test_one_head_has_the_middle_window_and_preconditioners_have_the_windows_too():
    layer = build_mixer("gdn", hidden_size=HIDDEN, num_heads=1, long_memory="windows")
    assert 1 / (1 - layer.decay(torch.zeros(1, 1, HIDDEN)).exp()).item() == pytest.approx(256, rel=1e-3)
    x = torch.zeros(1, 1, HIDDEN)
    for name in ("pgdn", "pdn", "pla", "pmamba2-key"):
        decays = [
            build_mixer(name, hidden_size=HIDDEN, num_heads=HEADS, long_memory=ramp).get_submodule(place)(x)
            for ramp in ("windows", None, "own", *["paper"] * (name == "pgdn"))
            for place in ("preconditioner.gates.decay" if name[-1] in "ny" else "preconditioner.decay",)
        ]
        assert 1 / (1 - decays[0][0, 0, 0].exp()).item() == pytest.approx(16, rel=1e-3)
        assert torch.equal(decays[1], decays[0])
        assert all(decay[0, 0, 0] != decays[0][0, 0, 0] for decay in decays[2:])
    with pytest.raises(ValueError, match="long_memory must be None"):
        build_mixer("pdn", hidden_size=HIDDEN, num_heads=HEADS, long_memory="windows", tie_preconditioner=True)


def test_ramps_of_a_memory_that_winds_up_are_always_long():
    layers = [
        build_mixer("rls", hidden_size=HIDDEN, num_heads=HEADS, decay="head", **options)
        for options in ({}, {"long_memory": "own"}, {"long_memory": "paper"}, {"long_memory": "release"})
    ]
    steps = [torch.nn.functional.softplus(layer.decay.dt_bias) for layer in layers]
    torch.testing.assert_close(steps[0], torch.tensor(STEPS["paper"]))
    assert torch.equal(steps[0], steps[1]) and torch.equal(steps[0], steps[2])
    torch.testing.assert_close(steps[3], torch.tensor(STEPS["release"]))


@pytest.mark.parametrize("old, new", [(True, "paper"), (False, "own")])
def test_long_memory_was_a_flag(old, new):
    layer = build_mixer("palimpsa-m", hidden_size=HIDDEN, num_heads=HEADS, long_memory=old)
    assert layer.options.long_memory == new


@pytest.mark.parametrize("name", ["deltanet", "linear", "mesa"])
def test_long_memory_needs_a_decay(name):
    options = {"decay": "none"} if name == "mesa" else {}
    with pytest.raises(ValueError, match="long_memory must be None with decay 'none'"):
        build_mixer(name, hidden_size=HIDDEN, num_heads=HEADS, long_memory="paper", **options)
    with pytest.raises(
        ValueError,
        match="long_memory must be one of None, 'paper', 'release', 'steps', 'windows', 'own', got 'release2'",
    ):
        build_mixer("gdn", hidden_size=HIDDEN, num_heads=HEADS, long_memory="release2")


def model(mixer, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2}
    return FastWeightsForCausalLM(FastWeightsConfig(**{**sizes, "mixer": mixer, **options})).requires_grad_(False)


def test_a_model_keeps_the_ramps_of_its_layers(tmp_path):
    """gla's are biases, which transformers would begin with zeros; what a checkpoint holds stays."""
    lm = model({"name": "gla", "long_memory": "release"})
    bias = lm.model.layers[1].mixer.decay.gk_proj[1].bias
    wanted = [-0.01 * 0.1 * 16, -0.16 * 0.001 * 16]
    torch.testing.assert_close(torch.nn.functional.logsigmoid(bias[[0, -1]]), torch.tensor(wanted), rtol=1e-4, atol=0)
    bias.fill_(0.5)
    lm.save_pretrained(tmp_path)
    loaded = FastWeightsForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[1].mixer.decay.gk_proj[1].bias, bias)


@pytest.mark.parametrize("name", ["gdn", "lattice", "palimpsa-m", "mamba2", "gka", "vla-conv"])
def test_first_filters(name):
    """Uniform in +-1/sqrt(4), or normal as every matrix of the model."""
    for conv_init, initializer_range in (("uniform", 0.05), ("normal", 0.05), ("normal", 0.2)):
        lm = model({"name": name, "conv_init": conv_init}, initializer_range=initializer_range)
        filters = [w for key, w in lm.named_parameters() if "conv" in key and key.endswith("weight")]
        values = torch.cat([w.detach().flatten() for w in filters])
        assert len(values) > 2000
        if conv_init == "uniform":
            assert values.abs().max() <= 0.5 and values.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.05)
        else:
            assert (
                values.std().item() == pytest.approx(initializer_range, rel=0.05)
                and values.abs().max() > 3 * values.std()
            )
        biases = [b for key, b in lm.named_parameters() if "conv" in key and key.endswith("bias")]
        assert not any(b.any() for b in biases)
    alone = build_mixer(name, hidden_size=512, num_heads=4, conv_init="normal")
    weight = next(w for key, w in alone.named_parameters() if "conv" in key and key.endswith("weight"))
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["palimpsa-d", "palimpsa-m"])
def test_first_beta_projection_as_released(name):
    """In +-1/sqrt(rank), rank 128 / 16, whatever the model's initializer_range."""
    for beta_init in ("normal", "uniform"):
        lm = model({"name": name, "beta_init": beta_init, "expand_v": 2.0})
        first, second = (m.weight.detach() for m in lm.model.layers[0].mixer.importance.beta_proj)
        assert first.std().item() == pytest.approx(0.02, rel=0.1)
        if beta_init == "uniform":
            assert 0.34 < second.abs().max() <= 8**-0.5 and second.std().item() == pytest.approx(
                (8 * 3) ** -0.5, rel=0.1
            )
        else:
            assert second.std().item() == pytest.approx(0.02, rel=0.1)
    keys = [
        set(build_mixer(name, hidden_size=32, num_heads=2, beta_init=how).state_dict()) for how in ("normal", "uniform")
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(("name", "first"), [("mamba2", 0.0), ("palimpsa-m", 0.0), ("palimpsa-d", 0.0)])
def test_first_skip(name, first):
    assert model(name).model.layers[1].mixer.skip.D.tolist() == [first] * 4
    assert model({"name": name, "skip_init": 0.5}).model.layers[1].mixer.skip.D.tolist() == [0.5] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "learning_rate"),
    [
        *(("softmax", 0.003), ("vla-softmax", 0.003), ("gdn", 0.003), ("mamba2", 0.01), ("palimpsa-m", 0.003)),
        *(
            ("retnet", 0.003),
            ("palimpsa-d", 0.01),
            ("pmamba2-tied", 0.01),
            ("pmamba2-key", 0.01),
            ("efla", 0.01),
            ("nlms", 0.01),
        ),
        ("comba", 0.01),
    ],
)
def test_defaults_learn(name, learning_rate, tmp_path, one_thread):
    """Recall of 4 pairs with all defaults of `fastweights recall`, at one of its learning rates; guessing gives 1/4."""
    runs = RecallExperiment(mixers=(name,), pairs=(4,), block="matched").runs()
    run = next(run for run in runs if run.learning_rate == learning_rate)
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.accuracy > 1 / 4 + 0.2


@pytest.mark.parametrize(("layers", "mlp", "branches"), [(2, 64, 4), (8, 64, 16), (2, 0, 2), (8, 0, 8)])
def test_residual_scaling_counts_branches(layers, mlp, branches):
    sizes = {"num_hidden_layers": layers, "intermediate_size": mlp}
    scaled, plain = model("deltanet", **sizes), model("deltanet", **sizes, scale_residuals=False)
    for lm, std in ((scaled, 0.02 * branches**-0.5), (plain, 0.02)):
        for block in lm.model.layers:
            assert block.mixer.output.o_proj.weight.std().item() == pytest.approx(std, rel=0.05)
            assert block.mixer.qkv.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
            if mlp:
                assert block.mlp.down_proj.weight.std().item() == pytest.approx(std, rel=0.05)
    with pytest.raises(TypeError, match="scale_residuals must be True or False"):
        model("deltanet", scale_residuals=1)
