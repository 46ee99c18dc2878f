"""Models of transformers compute with our ops what they compute without them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from fastweights.integrations import foreign_calls
from fastweights.integrations.transformers import accelerate, functions, restore
from tests.fast_set import fast_where
from tests.integrations.tiny_models import EARLIER, INSTALLED, VERSION, tiny
from tests.kernels.cases import DEVICE

LENGTHS = (70, 1, 29)
TWO = ("qwen3_next", "kimi_linear")  # one of each rule
TOKENS = 1 + torch.arange(2 * 70).view(2, 70) * 11 % 47


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often our ops are called, by name."""
    found: dict[str, int] = {}

    def count(module: Any, name: str) -> None:
        op = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return op(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    count(foreign_calls, "delta_rule")
    count(functions, "short_convolution")
    count(functions, "gated_rms_norm")
    return found


def results(model: nn.Module) -> dict[str, Tensor]:
    """Logits, and the gradients of a sum of them with given weights."""
    model.zero_grad()
    logits = model(TOKENS, use_cache=False)[0]
    (logits * torch.linspace(-9, 9, logits.numel()).sin().view_as(logits)).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        error = (got[name] - x).norm() / x.norm().clamp_min(1e-3)
        # Random layers on one another enlarge the last bits of a gradient, as those of PyTorch against float64 do.
        assert error < (1e-4 if name == "logits" else 1e-3), f"{name}: {error:.1e}"


def generated(model: nn.Module, **inputs: Tensor) -> Tensor:
    return model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, -6:]


@pytest.mark.parametrize("family", INSTALLED)
def test_logits_and_gradients(family: str, calls: dict[str, int]) -> None:
    model = tiny(family)
    wanted = results(model)
    assert accelerate(model) == (family,)
    assert_same(results(model), wanted)
    wanted_calls = {"delta_rule": 2, "short_convolution": 2, "gated_rms_norm": 2}  # two layers of the memory
    if EARLIER and family == "olmo_hybrid":  # its convolution is a class there, which stays
        del wanted_calls["short_convolution"]
    assert calls == wanted_calls


@fast_where(lambda given: given["family"] in TWO)
@pytest.mark.parametrize("family", INSTALLED)
def test_bfloat16(family: str) -> None:
    """At most twice as far from float32 as transformers' own code."""
    exact = tiny(family)
    rounded, wanted = deepcopy(exact).bfloat16(), results_of(exact, TOKENS)
    theirs = results_of(rounded, TOKENS)
    accelerate(rounded)
    ours = results_of(rounded, TOKENS)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and not torch.equal(ours, theirs)
    assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()


# The text model of glm5_next has no head of its own; some earlier versions cannot generate with olmo_hybrid, also without us.
GENERATING = [name for name in INSTALLED if name != "glm5_next" and not (EARLIER and name == "olmo_hybrid")]


@fast_where(lambda given: given["family"] in TWO)
@pytest.mark.parametrize("family", GENERATING)
def test_generated_tokens(family: str, calls: dict[str, int]) -> None:
    """After a prompt shorter than the filter of the convolution, and after a longer one with padding on its left."""
    model = tiny(family)
    padded = TOKENS[:, :20].clone()
    padded[0, :7] = 0
    prompts = [{"input_ids": TOKENS[:, :2]}, {"input_ids": padded, "attention_mask": (padded != 0).long()}]
    wanted = [generated(model, **prompt) for prompt in prompts]
    accelerate(model)
    for prompt, tokens in zip(prompts, wanted):
        assert torch.equal(generated(model, **prompt), tokens)
    assert calls["delta_rule"] == 2 * 2 * 6
    assert torch.equal(generated(model, input_ids=padded[:1, 7:]), wanted[1][:1])  # a sequence alone


def packed(lengths: tuple[int, ...], **options: bool) -> dict[str, Any]:
    """A row as transformers' collator sends it."""
    sequences = [TOKENS[0, :n] for n in lengths]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": x.tolist()} for x in sequences])
    return {name: x for name, x in batch.items() if name != "labels"}


# Families whose layers pass no boundaries to their convolution.
SILENT = [name for name in INSTALLED if EARLIER and (name == "olmo_hybrid" or Version("5.9") > VERSION)]


@fast_where(lambda given: given["family"] in TWO)
@pytest.mark.parametrize("family", [name for name in INSTALLED if name not in SILENT])
def test_packed_sequences_do_not_see_each_other(family: str) -> None:
    # Softmax attention over the whole row in glm5_next is not ours to mend.
    model = tiny(family, layer_types=["linear_attention"] * 3) if family == "glm5_next" else tiny(family)
    alone = torch.cat([results_of(model, TOKENS[:1, :n]) for n in LENGTHS], 1)
    weights = torch.linspace(-9, 9, alone.numel()).sin().view_as(alone)
    parts = [model(TOKENS[:1, :n], use_cache=False)[0] for n in LENGTHS]
    wanted = gradients(model, (torch.cat(parts, 1) * weights).sum())
    accelerate(model)
    row = packed(LENGTHS, return_flash_attn_kwargs=True)
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids"} < row.keys()
    got = model(**row, use_cache=False)[0]
    torch.testing.assert_close(got.detach(), alone, atol=1e-4, rtol=1e-4)
    assert_same(gradients(model, (got * weights).sum()), wanted)


@pytest.mark.parametrize("family", SILENT)
def test_layers_that_would_mix_packed_sequences_refuse_them(family: str) -> None:
    model = tiny(family)
    accelerate(model)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
        model(**packed(LENGTHS, return_flash_attn_kwargs=True), use_cache=False)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def results_of(model: nn.Module, tokens: Tensor | None = None, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**({"input_ids": tokens} if tokens is not None else {}), **inputs, use_cache=False)[0]


BY_NUMBER = {"return_seq_idx": True}


@pytest.mark.skipif(Version("5.9") > VERSION, reason="layers before 5.9 take neither")
@pytest.mark.parametrize(
    "options", [*([] if EARLIER else [BY_NUMBER]), {**BY_NUMBER, "return_flash_attn_kwargs": True}], ids=str
)
def test_packed_sequences_by_their_numbers(options: dict[str, bool]) -> None:
    """seq_idx alone tells where they begin, and does no harm beside cumulative lengths."""
    model = tiny("qwen3_next")
    alone = torch.cat([results_of(model, TOKENS[:1, :n]) for n in LENGTHS], 1)
    accelerate(model)
    torch.testing.assert_close(results_of(model, **packed(LENGTHS, **options)), alone, atol=1e-4, rtol=1e-4)


def originals(family: str) -> dict[str, Any]:
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])
    norms = [
        kind for kind in vars(module).values() if isinstance(kind, type) and kind.__name__.endswith("RMSNormGated")
    ]
    functions = {
        name: x
        for name, x in vars(module).items()
        if ("delta_" in name or "causal_conv1d" in name)
        and not name.startswith("is_")
        and (x is not None or name == "causal_conv1d_fn")  # None for a package that is not installed
    }
    return {**functions, **{kind.__name__: vars(kind)["forward"] for kind in norms}}


@pytest.mark.parametrize("family", INSTALLED)
def test_restore_gives_the_originals_back(family: str) -> None:
    before = originals(family)
    assert len(before) == (3 if EARLIER and family == "olmo_hybrid" else 5)
    assert accelerate() == accelerate() == tuple(INSTALLED)
    replaced = originals(family)
    assert all(replaced[name] is not x and replaced[name].replaces is x for name, x in before.items())
    restore()
    restore()
    assert all(found is before[name] for name, found in originals(family).items())


def test_a_model_replaces_its_family_only() -> None:
    before = {name: originals(name) for name in ("qwen3_next", "olmo_hybrid")}
    accelerate(nn.Sequential(tiny("qwen3_next")))
    assert originals("olmo_hybrid") == before["olmo_hybrid"]
    assert not set(originals("qwen3_next").values()) & set(before["qwen3_next"].values())


@pytest.mark.parametrize("named", [True, False])
def test_before_and_after_from_pretrained(tmp_path, calls: dict[str, int], named: bool) -> None:
    model = tiny("qwen3_next")
    wanted = results_of(model, TOKENS)
    model.save_pretrained(tmp_path)
    load: Callable[[], nn.Module] = lambda: AutoModelForCausalLM.from_pretrained(tmp_path).eval()  # noqa: E731
    accelerate()
    torch.testing.assert_close(results_of(load(), TOKENS), wanted, atol=1e-4, rtol=1e-4)
    restore()
    loaded, before = load(), dict(calls)
    torch.testing.assert_close(results_of(loaded, TOKENS), wanted)
    assert calls == before
    accelerate(loaded if named else None)
    torch.testing.assert_close(results_of(loaded, TOKENS), wanted, atol=1e-4, rtol=1e-4)
    assert calls == {name: 2 * n for name, n in before.items()}


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name == "kimi_linear" else ()) for name in INSTALLED if name in TWO],
)
def test_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, also in Triton's interpreter: a reading with gradients, a prompt and tokens after it."""
    model = tiny(family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]).to(DEVICE)
    tokens = TOKENS[:1, :18].to(DEVICE)

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        logits = model(tokens, use_cache=False)[0]
        logits.sin().sum().backward()
        with torch.no_grad():
            cache = model(tokens[:, :6], use_cache=True).past_key_values
            steps = [model(x, past_key_values=cache, use_cache=True)[0] for x in tokens[:, 6:9].split(1, 1)]
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": torch.cat([logits.detach(), *steps], 1), **gradients}

    wanted = run()
    launched = []
    for module, name in (
        *((foreign_calls, name) for name in ("delta_rule", "gated_rms_norm", "l2_normalize")),
        *((functions, name) for name in ("gated_rms_norm", "short_convolution", "takes_step")),
    ):
        monkeypatch.setattr(module, name, partial(getattr(module, name), backend="triton"))
    step = functions.short_convolution_step
    monkeypatch.setattr(functions, "short_convolution_step", lambda *x, **y: launched.append(1) or step(*x, **y))
    accelerate(model)
    assert_same(run(), wanted)
    assert len(launched) == 3


@pytest.mark.kernels
def test_the_convolution_reads_what_the_layer_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, D, T] as a view of [B, T, D] is not copied, and neither is what comes back."""
    from fastweights.kernels.pointwise import short_convolution as kernels

    read = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, x, *rest, **constants: read.append(x.data_ptr()))
    monkeypatch.setattr(functions, "short_convolution", partial(functions.short_convolution, backend="triton"))
    x = torch.randn(2, 10, 8, device=DEVICE)
    y = functions.convolve(functions.plain_convolution, x.mT, x.new_ones(8, 4), activation="silu")
    assert read == [x.data_ptr()] and y.shape == (2, 8, 10) and y.mT.is_contiguous()


def test_float64_runs_the_originals(calls: dict[str, int]) -> None:
    model = tiny("qwen3_5").double()
    wanted = results_of(model, TOKENS)
    accelerate(model)
    assert torch.equal(results_of(model, TOKENS), wanted)
    assert not calls


def test_wide_heads_run_the_original(calls: dict[str, int]) -> None:
    """Of more channels than our memories have; the convolution and the norm are ours."""
    model = tiny("qwen3_next", linear_key_head_dim=264)
    wanted = results(model)
    accelerate(model)
    assert_same(results(model), wanted)
    assert calls == {"short_convolution": 2, "gated_rms_norm": 2}


def test_what_the_convolution_and_the_norm_do_not_take() -> None:
    """Several packed rows, another activation, a gate of another shape: the originals get all that the caller gave."""

    def original(*arguments: Any, **options: Any) -> Any:
        return arguments, options

    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    numbers = {"seq_idx": torch.zeros(2, 9, dtype=torch.int32)}
    given = x, weight, None
    assert functions.convolve(original, *given, activation="silu", **numbers) == (
        given,
        {"activation": "silu", **numbers},
    )
    assert functions.convolve(original, *given, activation="gelu") == (given, {"activation": "gelu"})
    norm = nn.RMSNorm(9)
    norm.variance_epsilon = 1e-6
    for activation, gate in (("tanh", x), ("silu", x[:1]), ("silu", None)):
        norm.activation = activation
        assert functions.normalise_gated(original, norm, x, gate) == ((norm, x, gate), {})


def test_a_first_state_of_another_dtype() -> None:
    """A cache may hold states in 16 bits."""
    q, k, v = torch.randn(3, 2, 5, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    rest = {"normalize": True, "output_final_state": True}
    state = torch.ones(2, 2, 8, 8, dtype=torch.bfloat16)
    gates = torch.full((2, 5, 2), 0.5), torch.full((2, 5, 2), -0.1)
    given, exact = (
        foreign_calls.call_delta_rule(q, k, v, *gates, initial_state=one, **rest) for one in (state, state.float())
    )
    assert all(map(torch.equal, given, exact)) and given[1].dtype == torch.float32


def test_export_runs_the_originals(calls: dict[str, int]) -> None:
    norm = next(x for x in tiny("qwen3_next").modules() if type(x).__name__ == "Qwen3NextRMSNormGated")
    accelerate()
    x = torch.randn(5, norm.weight.shape[0])
    exported = torch.export.export(norm, (x, x))
    assert not calls
    restore()
    torch.testing.assert_close(exported.module()(x, x), norm(x, x))


# Earlier layers of other families have other parts.
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == TWO[0] else pytest.mark.slow)
        for name in INSTALLED
        if not EARLIER or name in TWO
    ],
)
def test_a_layer_compiles_into_one_graph(family: str, calls: dict[str, int]) -> None:
    """With gradients, and with packed sequences where cumulative lengths alone tell where they begin."""
    layer = next(x for x in tiny(family).modules() if hasattr(x, "conv1d"))
    x = torch.randn(1, 40, 32, requires_grad=True)
    lengths, packed = (
        ([40], {}) if EARLIER else ([25, 15], {"cu_seq_lens_q": torch.tensor([0, 25, 40], dtype=torch.int32)})
    )
    wanted = [torch.cat([layer(part) for part in x.split(lengths, 1)], 1)]
    wanted += torch.autograd.grad(wanted[0].sin().sum(), [x, layer.conv1d.weight])
    accelerate(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = [compiled(x, **packed)]
    got += torch.autograd.grad(got[0].sin().sum(), [x, layer.conv1d.weight])
    assert calls["delta_rule"] == 1
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "model, error, message",
    [
        (nn.Linear(2, 2), ValueError, "model must have layers of qwen3_next.*got Linear"),
        ("qwen3_next", TypeError, "model must be a torch.nn.Module or None, got str"),
    ],
    ids=["family", "kind"],
)  # fmt: skip
def test_bad_model(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        accelerate(model)
