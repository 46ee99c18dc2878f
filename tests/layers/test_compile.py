"""torch.compile of layers with states of their own kind: one graph, packed rows and decoding included."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastweights.layers import MIXERS, LayerCache

from .variants import HIDDEN, build


@pytest.mark.parametrize(
    "variant",
    ["palimpsa-m", "lattice similarity", "gka sketch", "vla refresh"],
)
@pytest.mark.slow
def test_one_graph(variant):
    torch._dynamo.reset()  # graphs of other layers count towards the limit of recompilations of one `forward`
    torch.manual_seed(0)
    layer, x, edges = build(variant), torch.randn(1, 12, HIDDEN), torch.tensor([0, 3, 3, 12])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, cu_seqlens=edges), layer(x, cu_seqlens=edges))
    with torch.no_grad():
        wanted, cache = layer(x), LayerCache()
        layer(x[:, :9], cache)
        steps = [compiled(token, cache) for token in x[:, 9:].split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), wanted[:, 9:], rtol=1e-4, atol=1e-5)


FAST = ("gdn",)


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MIXERS]
)
def test_one_graph_serves_all_sizes(mixer):
    """dynamic=True: batches and lengths change, and nothing is compiled again. Few tokens without gradients are read by other
    means, which is one more graph. In float64: the convolution of a graph adds up in another order."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, graphs = build(mixer).double(), CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for batch, time in ((2, 20), (3, 70), (5, 33)):
        x = torch.randn(batch, time, HIDDEN, dtype=torch.float64)
        got, wanted = (torch.autograd.grad(f(x).square().sum(), layer.parameters()) for f in (compiled, layer))
        torch.testing.assert_close(got, wanted)
    assert graphs.frame_count == 1
    graphs.clear()
    with torch.no_grad():
        for batch, time in ((3, 9), (2, 14), (4, 40), (2, 30)):
            x = torch.randn(batch, time, HIDDEN, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), layer(x))
    assert graphs.frame_count <= 2
