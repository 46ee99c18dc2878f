"""Every measure against the same numbers computed another way, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fastweights_studies.inspection import MEASURES, inspect_model
from fastweights_studies.inspection.panels import Panel, make_histogram
from fastweights_studies.inspection.reading import read_layers
from fastweights_studies.inspection.transitions import transitions

from fastweights.layers import LayerCache, build_mixer
from fastweights.ops import gated_kalmanet, palimpsa_posterior
from fastweights.ops.shared.ridge.iterations import iterate
from tests.evaluation.small import model as small_model

IDS = torch.randint(400, (30,), generator=torch.Generator().manual_seed(0))
LINEAR = (
    *("linear", "gla", "mamba2", "palimpsa-d", "palimpsa-m", "gka", "mesa"),
    *("deltanet", "gdn", "kda", "pgdn", "pkda", "longhorn", "vla", "rls"),
)


def panels(mixer, measure, every=7, **options) -> dict[str, Panel]:
    found = inspect_model(small_model(mixer, **options).double(), IDS, every=every, measures=[measure])
    return {panel.name: panel for panel in found.panels[measure][0]}


def reading(mixer, every=7):
    return read_layers(small_model(mixer).double(), IDS, every)[0]


def memory(layer, x, first, name):
    """The memory after x, from a state whose `name` is `first`."""
    cache = LayerCache()
    layer(x[:, :1], cache)
    cache.memory[name] = first
    layer(x[:, 1:], cache)
    return cache.memory[name]


@pytest.mark.parametrize("mixer", LINEAR)
def test_transitions_are_how_the_memory_answers_to_a_change_of_its_past(mixer):
    torch.manual_seed(0)
    name = {"palimpsa-d": "M", "palimpsa-m": "M", "gka": "U", "mesa": "U"}.get(mixer, "S")
    layer = build_mixer(mixer, hidden_size=16, num_heads=2).double().eval()
    x = torch.randn(1, 9, 16, dtype=torch.float64)

    class Body(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = layer

        def forward(self, ids):
            return self.mixer(x)

    cache = LayerCache()
    layer(x[:, :1], cache)
    first = cache.memory[name].double()
    change = torch.randn(first.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        moved = memory(layer, x, first + change, name) - memory(layer, x, first, name)
    found = transitions(read_layers(Body(), torch.zeros(9, dtype=torch.long), 9)[0])
    expected = change[0]
    for t in range(1, 9):
        expected = found.apply(t, expected)
    assert (moved[0] - expected).norm() <= 1e-6 * expected.norm()


def test_norms_of_transitions():
    layer, found = reading("pgdn"), panels("pgdn", "jacobians")
    whole = torch.eye(8, dtype=torch.float64).expand(2, -1, -1)
    a, beta = layer.values["g"].exp(), layer.values["beta"]
    k, w = layer.values["k"], layer.values["write_key"]
    for t in range(30):
        step = (torch.eye(8) - beta[t, :, None, None] * w[t, :, :, None] * k[t, :, None, :]) * a[t, :, None, None]
        whole = step @ whole
    assert torch.allclose(found["step"].y[-1], torch.linalg.svdvals(step)[:, 0])
    assert torch.allclose(found["whole"].y[-1], torch.linalg.svdvals(whole)[:, 0])
    assert torch.allclose(found["whole"].y[0], found["piece"].y[0])
    assert found["step"].x.tolist() == [7, 14, 21, 28, 30]


def test_lattice_and_softmax_have_no_linear_transitions():
    assert transitions(reading("lattice")) is None
    assert inspect_model(small_model("softmax"), IDS, measures=["jacobians", "norms"]).panels == {}


def test_memory_window():
    windows = 1 / (1 - reading("gdn").values["g"].exp())
    assert torch.allclose(panels("gdn", "window")["window"].y[1], windows[7:14].mean(0))
    channels = 1 / (1 - reading("kda").values["g"].exp())
    assert torch.allclose(panels("kda", "window")["window"].y[-1], channels[28:].mean((0, 2)))
    assert "window" not in inspect_model(small_model("deltanet"), IDS).panels


def test_norms():
    layer = reading("vla")
    found = panels("vla", "norms")
    assert torch.allclose(found["norm_A"].y[2, 1], torch.linalg.matrix_norm(layer.states["A"][2, 1]))
    assert set(found) == {"norm_S", "norm_A", "norm_z"}


def test_write_eigenvalues():
    layer, found = reading("pgdn"), panels("pgdn", "writes")
    eigenvalues = layer.values["beta"] * (layer.values["write_key"] * layer.values["k"]).sum(2)
    panel = found["write_eigenvalue"]
    assert torch.allclose(panel.y.sum(0), torch.ones(2, dtype=torch.float64))
    width = (panel.x[1] - panel.x[0]).item()
    assert ((panel.x[:, None] * panel.y).sum(0) - eigenvalues.mean(0)).abs().max() < width
    assert panel.x[0] - width <= eigenvalues.min() and eigenvalues.max() <= panel.x[-1] + width


def test_key_gram():
    k = reading("deltanet").values["k"]
    found = panels("deltanet", "keys")
    gram = k[:, 1].T @ k[:, 1]
    assert torch.allclose(found["eigenvalues"].y[:, 1], torch.linalg.svdvals(gram))
    assert torch.allclose(found["diagonal"].y[:, 1], gram.diagonal().sort(descending=True).values)
    part = k[:14, 1].T @ k[:14, 1]
    eigenvalues, vectors = torch.linalg.eigh(part)
    expected = (eigenvalues * vectors.abs().max(0).values).sum() / eigenvalues.sum()
    assert torch.allclose(found["alignment"].y[1, 1], expected)


def test_preconditioner():
    found = panels("pgdn", "preconditioner")
    layer = reading("pgdn")
    factors = layer.values["write_key"] / layer.values["k"]
    assert found["factor"].x[0] >= 1 / 1.5 and found["factor"].x[-1] <= 1.5
    assert abs((found["factor"].x * found["factor"].y[:, 0]).sum() - factors[:, 0].mean()) < 0.02
    assert found["energy"].log_x and found["energy"].x[0] > 0
    assert layer.states["A"].min() <= found["energy"].x.max() and layer.states["A"].max() >= found["energy"].x.min()


@pytest.mark.parametrize("bound", [1.5, 1.2])
def test_centers_and_saturation(bound):
    mixer = {"name": "pgdn", "bound": bound}
    layer, found = reading(mixer), panels(mixer, "preconditioner")
    center = layer.mixer.preconditioner.center.detach()
    assert torch.equal(found["center"].y[0], center) and len(found["center"].x) == 1
    distance = (layer.states["A"][2, 1] + 1e-6).log() - center[1]
    assert torch.allclose(found["saturation_tanh"].y[2, 1], distance.tanh().abs().mean())
    assert torch.allclose(found["saturation_softsign"].y[2, 1], (distance.abs() / (1 + distance.abs())).mean())
    panel = found["by_softsign"]
    assert panel.y[panel.x == 0].item() == 1 and panel.y[panel.x == 1].item() == pytest.approx(bound**-0.5)
    # The factors of the text are on the curve, of the token that stands at a place.
    t = layer.ends[2] - 1
    factor = layer.values["write_key"][t, 1] / layer.values["k"][t, 1]
    expected = np.interp(distance.clamp(-8, 8), panel.x, panel.y[:, 0])
    assert np.allclose(factor, expected, atol=1e-3)


def test_gates():
    layer, found = reading("pgdn"), panels("pgdn", "gates")
    for name, values in (("decay", layer.values["g"].exp()), ("gain", layer.values["beta"])):
        panel = found[name]
        width = panel.x[1] - panel.x[0]
        assert ((panel.x[:, None] * panel.y).sum(0) - values.mean(0)).abs().max() < width
    assert set(panels("deltanet", "gates")) == {"gain"}


def test_divisors_of_reversed_solvers():
    """Of one place, from the iterates themselves: x_3 - x_2 = a r_2 + b (x_2 - x_1)."""
    layer, found = reading("gka", every=30), panels("gka", "divisors", every=30)
    ridge = layer.mixer.options.ridge
    H, q = layer.states["H"][0], layer.per_head("q")[-1]
    for head in range(2):
        norm = torch.linalg.matrix_norm(H[head])
        matrix = H[head] + ridge * norm * torch.eye(8, dtype=torch.float64)
        for solver in ("chebyshev", "conjugate_gradient"):
            first = int(solver == "conjugate_gradient")  # Chebyshev's begins with a step before the first iteration
            x = [iterate(solver, matrix.matmul, q[head], ridge * norm, norm, n) for n in range(first, first + 3)]
            columns = torch.stack([q[head] - matrix @ x[1], x[1] - x[0]], 1)
            _, divisor = torch.linalg.lstsq(columns, (x[2] - x[1])[:, None]).solution[:, 0]
            at = 1 if solver == "chebyshev" else 2  # the iteration that made the last of the three, from 0
            for which in ("least", "largest"):
                assert torch.allclose(found[f"{solver}_{which}"].y[at, head], divisor), (solver, which)
    limit = found["chebyshev_least"].y
    assert (limit[1:] <= limit[:-1]).all() and limit.max() <= 1
    assert panels("gka", "divisors")["conjugate_gradient_largest"].y.nan_to_num(0).max() > 1


def test_metaplasticity():
    importance = reading("palimpsa-d").states["J"][-1, 0] + 1
    expected = (importance.max() - importance.min()) / importance.min()
    assert torch.allclose(panels("palimpsa-d", "metaplasticity")["ratio"].y[-1, 0], expected)


@pytest.mark.parametrize("mixer", ["palimpsa-d", "palimpsa-m"])
def test_calibration(mixer):
    layer, found = reading(mixer), panels(mixer, "calibration")
    k, v = layer.values["k"], layer.values["v"]
    states = tuple(layer.states[name][-1][None] for name in ("M", "J"))
    answers, variances = [], []
    for t in range(30):  # the answer of the last memory to the key of token t: one more token that writes nothing
        zero = torch.zeros_like(v[t])[None, None]
        read = k[t][None, None], torch.zeros_like(k[t])[None, None], zero, zero, torch.zeros_like(zero[..., 0])
        o, variance, _ = palimpsa_posterior(*read, prior=1.0, scale=1.0, initial_state=states)
        answers.append(o[0, 0])
        variances.append(variance[0, 0].mean(1))
    target = v * layer.values["step_size"][..., None] / layer.values["importance"]
    errors = (torch.stack(answers) - target).square().mean(2)
    variance, order = torch.stack(variances)[:, 0], torch.stack(variances)[:, 0].argsort()
    assert torch.allclose(found["variance"].y[:, 0], variance[order].view(10, 3).mean(1))
    assert torch.allclose(found["error"].y[:, 0], errors[order, 0].view(10, 3).mean(1))


@pytest.mark.parametrize("options", [{}, {"adaptive_ridge": False, "ridge": 0.25}, {"sketch": 4}])
def test_condition_and_residuals(options):
    mixer = {"name": "gka", **options}
    layer = reading(mixer)
    H, q = layer.states["H"], layer.select_ends(layer.per_head("q"))
    size = torch.linalg.matrix_norm(H)
    ridge = 0.25 * torch.ones_like(size) if options.get("ridge") else 0.02 * size
    matrix = H + ridge[..., None, None] * torch.eye(H.shape[-1])
    assert torch.allclose(panels(mixer, "condition")["condition"].y, torch.linalg.cond(matrix))
    found = panels(mixer, "residuals")
    if "sketch" in options:
        q = layer.mixer.sketch(q[None])[0].detach()
    channels = H.shape[-1]
    for solver, panel in found.items():
        # With U = I and nothing written, the op answers with the solution itself.
        nothing = torch.zeros_like(q)[:, None]
        U = torch.eye(channels, dtype=torch.float64).expand_as(H)
        x, _ = gated_kalmanet(
            q[:, None], nothing, nothing, nothing[..., 0], ridge=options.get("ridge", 0.02), iterations=10, solver=solver,
            adaptive_ridge=options.get("adaptive_ridge", True), scale=1.0, initial_state=(H, U),
        )  # fmt: skip
        residual = (torch.einsum("phij,phj->phi", matrix, x[:, 0]) - q).norm(dim=2) / q.norm(dim=2)
        assert torch.allclose(panel.y[panel.x == 10][0], residual.amax(0), rtol=1e-6, atol=1e-12), solver
    assert found["conjugate_gradient"].y[-1].max() < 1e-12


def test_condition_of_mesa():
    layer = reading("mesa")
    matrix = layer.states["H"] + torch.diag_embed(layer.values["ridge"])
    assert torch.allclose(panels("mesa", "condition")["condition"].y, torch.linalg.cond(matrix))
    assert panels("mesa", "residuals")["chebyshev"].y[-1].max() < 1e-3


def exact_ridge(q, k, g, mix, v):
    """A Gated KalmaNet layer's answers [T, heads, V] by `torch.linalg.solve`, token by token."""
    answers = []
    H = U = 0
    for t in range(len(q)):
        a = g[t].exp()[:, None, None]
        H = a * H + k[t][:, :, None] * k[t][:, None, :]
        U = a * U + k[t][:, :, None] * v[t][:, None, :]
        ridge = 0.02 * H.square().sum((1, 2), keepdim=True).sqrt() * torch.eye(H.shape[-1])
        x = torch.linalg.solve(H + ridge, q[t])
        answers.append(torch.einsum("hk,hkv->hv", mix[t][:, None] * x + (1 - mix[t][:, None]) * q[t], U))
    return torch.stack(answers)


def test_gradient_error_of_one_layer():
    """Against autograd through `torch.linalg.solve`."""
    layer, found = reading("gka"), panels("gka", "gradients")
    values = [layer.values[name] for name in ("q", "k", "g", "mix", "v")]
    values[:2] = [x.clone().requires_grad_() for x in values[:2]]
    weights = torch.randn((1, *layer.values["v"].shape), generator=torch.Generator().manual_seed(0))[0].double()
    exact = torch.autograd.grad((exact_ridge(*values) * weights).sum(), values[:2])
    q, k = (layer.values[name][None].clone().requires_grad_() for name in ("q", "k"))
    g, mix, v = (layer.values[name][None] for name in ("g", "mix", "v"))
    for solver in ("chebyshev", "conjugate_gradient"):
        o, _ = gated_kalmanet(
            q, k, v, g, mix=mix, ridge=0.02, adaptive_ridge=True, iterations=3, solver=solver, scale=1.0
        )
        own = torch.autograd.grad((o[0] * weights).sum(), (q, k))
        for head in range(2):
            difference = torch.cat([a[0, :, head] - b[:, head] for a, b in zip(own, exact)])
            expected = difference.norm() / torch.cat([b[:, head] for b in exact]).norm()
            assert torch.allclose(found[f"one_layer_{solver}"].y[1, head], expected, rtol=1e-4), (solver, head)


def test_gradient_error_of_five_layers():
    """By iteration, for both solvers: Chebyshev's goes to nothing, and the layers solve as before afterwards."""
    model = small_model(["gka"] * 5).double()
    found = inspect_model(model, IDS, measures=["gradients"]).panels["gradients"]
    assert list(found) == [0, 1, 2, 3, 4]
    assert all(block.mixer.options == model.model.layers[0].mixer.options for block in model.model.layers)
    assert model.model.layers[0].mixer.options.solver == "chebyshev"
    for own in found.values():
        assert [panel.name for panel in own] == [
            f"{name}_{solver}" for solver in ("chebyshev", "conjugate_gradient") for name in ("one_layer", "stack")
        ]
        for panel in own[:2]:
            assert panel.x.tolist() == [1, 3, 10, 30] and panel.y.shape == (4, 2 if panel.name[0] == "o" else 1)
            assert panel.y[0].min() > 1e-1 and panel.y[-1].max() < 1e-2
            assert (panel.y[-1] < panel.y[:-1]).all()

    def gradients(solver, iterations):
        other = small_model([{"name": "gka", "solver": solver, "iterations": iterations}] * 5).double()
        other(IDS[None], labels=IDS[None]).loss.backward()
        return torch.cat([x.grad.flatten() for x in other.model.layers[2].mixer.parameters()])

    exact = gradients("exact", 30)
    expected = (gradients("conjugate_gradient", 3) - exact).norm() / exact.norm()
    assert torch.allclose(found[2][3].y[1, 0], expected)


def test_gradient_error_of_the_layers_own_solver():
    found = panels({"name": "gka", "solver": "gradient_descent"}, "gradients")
    assert {"one_layer_gradient_descent", "stack_gradient_descent"} < found.keys()
    assert set(panels({"name": "gka", "solver": "exact"}, "gradients")) == {
        f"{name}_{solver}" for name in ("one_layer", "stack") for solver in ("chebyshev", "conjugate_gradient")
    }


def test_slots():
    layer, found = reading("lattice"), panels("lattice", "slots")
    slots = layer.states["S"][1, 0]
    slots = slots / slots.norm(dim=1, keepdim=True)
    overlaps = [abs(slots[i] @ slots[j]) for i in range(8) for j in range(8) if i != j]
    assert torch.allclose(found["overlap"].y[1, 0], torch.stack(overlaps).mean())
    h = slots.T @ layer.values["k"][14, 0] - layer.values["v"][14, 0]
    parts = [(h - s * (s @ h)).norm() / h.norm() for s in slots]
    assert torch.allclose(found["novelty"].y[1, 0], torch.stack(parts).mean())
    assert found["novelty"].x.tolist() == [7, 14, 21, 28]  # nothing follows the last token


def test_distribution_of_equal_values_and_of_values_that_are_not_positive():
    panel = make_histogram("x", torch.full((5, 2, 1), 3.0), "x")
    assert torch.allclose(panel.y.sum(0), torch.ones(2, dtype=torch.float64))
    assert abs((panel.x * panel.y[:, 0]).sum() - 3.0) < 0.02
    logarithmic = make_histogram("x", torch.tensor([0.0, -1.0, 1.0, 100.0])[:, None, None], "x", log_x=True)
    assert math.isclose(logarithmic.y.sum().item(), 1.0) and logarithmic.x[0] > 0


def test_arguments(recwarn):
    model = small_model("gdn").train()
    with pytest.raises(ValueError, match="measures must be one of"):
        inspect_model(model, IDS, measures=["windows"])
    with pytest.raises(ValueError, match="ids must be at least 2 token ids"):
        inspect_model(model, [3])
    with pytest.raises(ValueError, match="ids must be from 0 to 399"):
        inspect_model(model, [3, 400])
    with pytest.raises(ValueError, match="every"):
        inspect_model(model, IDS, every=0)
    inspect_model(model, IDS, measures=["norms"])
    assert model.training and set(MEASURES) >= {"window", "gradients"}
