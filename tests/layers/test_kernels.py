"""What surrounds a memory, on its kernels: the same as in PyTorch, gradients and windows included."""

import pytest
import torch

from fastweights.layers import LayerCache
from fastweights.layers.heads import HeadSizes
from fastweights.layers.norms import GroupedRMSNorm
from fastweights.layers.projections import OutputProjection, QKVProjection, SharedQKProjection
from tests.kernels.cases import DEVICE

HEADS = HeadSizes(2, 4, 5, 6)
pytestmark = pytest.mark.kernels


def both(module, call):
    """Results, and gradients in all parameters, of the kernels and of PyTorch."""
    for backend in ("triton", "torch"):
        module.backend = backend
        results = call()
        gradients = torch.autograd.grad(sum(y.sin().sum() for y in results), list(module.parameters()))
        yield [*results, *gradients]


@pytest.mark.slow
@pytest.mark.parametrize("projection", [QKVProjection, SharedQKProjection])
def test_projection(projection):
    torch.manual_seed(0)
    module = projection(8, HEADS, 4, "silu", True).to(DEVICE)
    x, edges = torch.randn(1, 6, 8, device=DEVICE), torch.tensor([0, 2, 6], device=DEVICE)
    cache = LayerCache()
    cache.update({}, {name: y.detach() for name, y in module(x, LayerCache(), edges)[3].items()})

    def call():
        *heads, windows = module(x, cache, edges)
        return [*heads, *windows.values()]

    got, wanted = both(module, call)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
def test_output(gate):
    torch.manual_seed(0)
    module = OutputProjection(8, HEADS, gate, False, 1e-6).to(DEVICE)
    o, x = torch.randn(2, 3, 4, 6, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    got, wanted = both(module, lambda: [module(o, x)])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_norm(groups):
    torch.manual_seed(0)
    norm, joint = GroupedRMSNorm(12, groups, 1e-6).to(DEVICE), torch.randn(2, 3, 30, device=DEVICE)
    x, z = joint[..., 2:14], joint[..., 14:26]
    torch.testing.assert_close(norm(x, z, "silu", "triton"), norm(x, z, "silu", "torch"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm(x, backend="triton"), norm(x, backend="torch"), rtol=1e-4, atol=1e-5)
