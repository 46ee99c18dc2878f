"""What only kernels replace in models of transformers: norms, SwiGLU, the loss, and the layers that read joint projections."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from fastweights.integrations.transformers import (
    accelerate,
    functions,
    gated_delta_layer,
    kimi_layer,
    pointwise,
    restore,
)
from tests.fast_set import slow
from tests.integrations.tiny_models import EARLIER, INSTALLED, tiny
from tests.kernels.cases import DEVICE

# By family whose memory layers are ours, how often they call which convolution.
LAYERS = {} if EARLIER else {
    "qwen3_next": ("convolve_slices", 1), "qwen3_5": ("convolve_slices", 1), "kimi_linear": ("short_convolution", 3),
}  # fmt: skip
# The layers of the others, and prompts of all but one, are slow tests.
FEW_LAYERS = [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often our functions are called, by name. They take the kernels also in Triton's interpreter."""
    found: dict[str, int] = {}

    def replace(module: Any, name: str, counted: bool, **options: str) -> None:
        function = getattr(module, name)

        def replaced(*arguments: Any, **given: Any) -> Any:
            found[name] = found.get(name, 0) + counted
            return function(*arguments, **given, **options)

        monkeypatch.setattr(module, name, replaced)

    def taken(takes: Callable[[str, Tensor], bool], backend: str, x: Tensor) -> bool:
        return x.dtype != torch.float64 and takes("triton", x)

    for module in (pointwise, gated_delta_layer):
        for name in ("takes_kernels", "takes_rows"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, partial(taken, getattr(module, name)))
    for name in ("residual_norm", "silu_product", "cross_entropy_rows", "cross_entropy_errors"):
        replace(pointwise, name, True, backend="triton")
    replace(functions, "gated_rms_norm", False, backend="triton")
    replace(gated_delta_layer, "convolve_slices", True)
    replace(kimi_layer, "short_convolution", True, backend="triton")
    return found


def classes(family: str, ending: str) -> list[Any]:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return [x for name, x in vars(module).items() if isinstance(x, type) and name.endswith(ending)]


def values(call: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> list[Tensor]:
    """The result, and gradients in the inputs and parameters."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    y = call(*inputs, **options)
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    towards = torch.linspace(-3, 3, y.numel(), device=y.device).sin().view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*inputs, *parameters], towards)]


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max(((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in zip(got, wanted, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", INSTALLED)
def test_norms(family: str, dtype: torch.dtype, calls: dict[str, int]) -> None:
    """At most as far from float64 as transformers' own, but for last digits; slices are read where they lie."""
    for kind in classes(family, "RMSNorm"):
        if "Unweighted" in kind.__name__:
            continue
        torch.manual_seed(0)
        norm = kind(24, eps=1e-3).to(DEVICE)
        nn.init.normal_(norm.weight, mean=norm.weight.mean().item(), std=0.3)
        norm = norm.to(dtype)
        x = torch.randn(2, 7, 3, 48, device=DEVICE).to(dtype)[..., 12:36]
        exact = values(deepcopy(norm).double(), x.double())
        theirs = values(norm, x)
        accelerate()
        ours = values(norm, x)
        restore()
        assert calls.pop("residual_norm") == 1
        assert [y.dtype for y in ours] == [y.dtype for y in theirs]
        assert distance(ours, exact) <= distance(theirs, exact) + 2 * torch.finfo(dtype).eps


@pytest.mark.kernels
def test_norms_that_the_kernels_do_not_take(calls: dict[str, int]) -> None:
    """Of groups, without a weight, with a weight of another dtype, in float64 and in a traced graph the originals run."""
    accelerate()
    x = torch.randn(2, 8, device=DEVICE)
    (norm,) = (kind(8).to(DEVICE) for kind in classes("qwen3_next", "RMSNorm"))
    graph = torch.compile(norm, fullgraph=True, backend="eager")
    for call, given in ((deepcopy(norm).double(), x.double()), (norm, x.bfloat16()), (graph, x)):
        call(given)
    if "qwen4_exp" in INSTALLED:
        (grouped,) = (kind(8, group_size=4).to(DEVICE) for kind in classes("qwen4_exp", "TextRMSNorm"))
        torch.testing.assert_close(grouped(x), F.rms_norm(x.view(2, 2, 4), (4,), eps=1e-6).view(2, 8))
    if "glm5_next" in INSTALLED:
        (without,) = (kind() for kind in classes("glm5_next", "UnweightedRMSNorm"))
        torch.testing.assert_close(without(x), F.rms_norm(x, (8,), eps=1e-6))
    assert not calls


@pytest.mark.kernels
@pytest.mark.parametrize("family", [name for name in INSTALLED if name != "glm5_next"])
def test_gated_products(family: str, calls: dict[str, int]) -> None:
    mlp = next(x for x in tiny(family).modules() if type(x).__name__.endswith("MLP")).to(DEVICE)
    x = torch.randn(2, 5, 32, device=DEVICE)
    wanted = values(mlp, x)
    accelerate()
    assert distance(values(mlp, x), wanted) < 1e-5 and calls == {"silu_product": 1}
    mlp.act_fn = nn.GELU()
    gelu = mlp(x)
    restore()
    assert torch.equal(mlp(x), gelu) and calls == {"silu_product": 1}


@pytest.mark.kernels
@pytest.mark.skipif("glm5_next" not in INSTALLED, reason="this transformers has no such model")
def test_a_product_with_limits_stays(calls: dict[str, int]) -> None:
    model = tiny("glm5_next").to(DEVICE)
    accelerate(model)
    for x in model.modules():
        if type(x).__name__.endswith("MLP"):
            x(torch.randn(2, 32, device=DEVICE))
    assert "silu_product" not in calls


LOGITS = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
LABELS = torch.tensor([[3, 4, 49, -100, 0, 7], [-100] * 5 + [1]], device=DEVICE)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "options",
    [
        {}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(5)}, {"ignore_index": 7},
        {"shift_labels": LABELS.roll(1, 0)}, {"labels": torch.full_like(LABELS, -100)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss(options: dict[str, Any], dtype: torch.dtype, calls: dict[str, int]) -> None:
    if "ignore_index" in options:
        options = {**options, "labels": LABELS.clamp_min(0)}
    model = tiny("qwen3_next")
    accelerate(model)
    given = {"labels": LABELS, "vocab_size": 50, **options}
    wanted, got = (
        values(lambda x, loss=loss: loss(x, **given), LOGITS.to(dtype))
        for loss in (ForCausalLMLoss, model.loss_function)
    )
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
    assert calls == {"cross_entropy_rows": 1, "cross_entropy_errors": 1}


@pytest.mark.kernels
def test_losses_that_stay(calls: dict[str, int]) -> None:
    """In float64, of a model of another family, and what a model was given."""
    model: Any = tiny("qwen3_next")
    other = tiny("olmo_hybrid")
    accelerate(model)
    assert other.loss_function is ForCausalLMLoss
    wanted = ForCausalLMLoss(LOGITS.double(), LABELS, 50)
    torch.testing.assert_close(model.loss_function(LOGITS.double(), LABELS, 50), wanted)
    model.loss_function = F.cross_entropy
    assert model.loss_function is F.cross_entropy and not calls
    restore()
    assert tiny("qwen3_next").loss_function is ForCausalLMLoss and model.loss_function is F.cross_entropy


def memory_layer(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    layer: Any = next(x for x in tiny(family, **changes).modules() if hasattr(x, "conv1d")).to(DEVICE)
    for rates in (x for x in layer.modules() if hasattr(x, "dt_bias")):
        nn.init.normal_(rates.dt_bias, mean=-4)  # strong decays would have hardly any gradients
        nn.init.zeros_(rates.A_log)
    return layer


NARROW = {"linear_value_head_dim": 4, "linear_num_value_heads": 2}
X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.kernels
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", FEW_LAYERS)
def test_layers(family: str, padded: bool, calls: dict[str, int]) -> None:
    """With values of half as many channels as keys have, in as many heads, and padding; with twice as many heads as usual."""
    layer = memory_layer(family, **(NARROW if padded and family != "kimi_linear" else {}))
    mask = torch.ones(2, 10, device=DEVICE, dtype=torch.long)
    mask[0, :3] = 0
    options = {"attention_mask": mask} if padded else {}
    wanted = values(layer, X, **options)
    accelerate(layer)
    assert distance(values(layer, X, **options), wanted) < 1e-4
    name, count = LAYERS[family]
    assert calls[name] == count


@pytest.mark.kernels
@pytest.mark.parametrize("family", slow(*LAYERS))
def test_packed_sequences(family: str, calls: dict[str, int]) -> None:
    layer, lengths = memory_layer(family), [4, 1, 5]
    wanted = torch.cat([layer(x) for x in X[:1].split(lengths, 1)], 1)
    accelerate(layer)
    ends = torch.tensor([0, 4, 5, 10], dtype=torch.int32, device=DEVICE)
    for options in ({"cu_seq_lens_q": ends}, {"seq_idx": torch.tensor([[0] * 4 + [1] + [2] * 5], device=DEVICE)}):
        torch.testing.assert_close(layer(X[:1], **options), wanted, atol=1e-5, rtol=1e-5)
    name, count = LAYERS[family]
    assert calls[name] == 2 * count


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("length", "family"),
    [
        pytest.param(length, name, marks=() if (length, name) == (2, "kimi_linear") else pytest.mark.slow)
        for length in (2, 9)
        for name in LAYERS
    ],
)
def test_a_prompt_and_what_follows(family: str, length: int, calls: dict[str, int]) -> None:
    """The first part of a sequence fills the cache; later ones go on with it by transformers' own code."""
    model = tiny(family).to(DEVICE)
    tokens = 1 + torch.arange(12, device=DEVICE)[None] * 11 % 47

    def run() -> list[Tensor]:
        with torch.no_grad():
            first = model(tokens[:, :length], use_cache=True)
            cache = first.past_key_values
            states = [
                x.clone() for x in (*cache.layers[0].conv_states.values(), *cache.layers[0].recurrent_states.values())
            ]
            rest = [
                model(x, past_key_values=cache, use_cache=True)[0]
                for x in tokens[:, length:].split([1, 11 - length], 1)
            ]
        return [first[0], *states, *rest]

    wanted = run()
    accelerate(model)
    for x, y in zip(run(), wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    name, count = LAYERS[family]
    assert calls[name] == 2 * count  # two layers of the memory


@pytest.mark.kernels
@pytest.mark.skipif(not LAYERS, reason="layers of this version hold functions")
def test_layers_that_the_kernels_do_not_take(calls: dict[str, int]) -> None:
    accelerate()
    layer = memory_layer("qwen3_next")
    torch.compile(layer, fullgraph=True, backend="eager")(X)
    layer.double()(X.double())
    layer.float()(X[:, :1])
    memory_layer("qwen3_next", linear_key_head_dim=264)(X)
    memory_layer("qwen3_next", hidden_act="gelu")(X)
    memory_layer("qwen3_next", linear_conv_kernel_dim=9)(X)
    assert "convolve_slices" not in calls
