"""torch.compile of layers with states of their own kind: one graph, packed rows and decoding included."""

from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastweights.layers import MIXERS, LayerCache, build_mixer
from fastweights.ops.framework.node import Node, NodeRule

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


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
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


class ShapesAlone(NamedTuple):
    """A node's rule whose results have the right shapes, and numbers that mean nothing."""

    rule: NodeRule

    def fake(self, tensors, options):
        return self.rule.fake(tensors, options)

    def forward(self, tensors, options, save):
        return self.fake(tensors, options)

    def backward(self, tensors, options, saved, output_grads, needed):
        return [torch.zeros_like(x) if need else None for x, need in zip(tensors, needed)]


@pytest.fixture
def shapes_alone(monkeypatch):
    rule = property(lambda node: ShapesAlone(vars(node)["rule"]), lambda node, rule: vars(node).update(rule=rule))
    monkeypatch.setattr(Node, "rule", rule, raising=False)


# One for every family of kernels, and every way to be cut into segments.
WITH_KERNELS = ("gdn", "linear", "pkda", "gka", "mesa", "ttt", "palimpsa-d", "lattice", "vla", "rls")


@pytest.mark.slow  # tests/kernels/test_autograd.py has ops in one graph
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("mixer", WITH_KERNELS)
@pytest.mark.kernels
def test_one_graph_of_kernels_serves_all_sizes(shapes_alone, mixer, packed):
    """Few tokens, sequences that are not cut into segments, that are, and that are too many. Kernels run at none of them: sizes
    alone are what a graph could depend on."""
    torch._dynamo.reset()
    layer, graphs = (
        build_mixer(mixer, hidden_size=32, num_heads=2, backend="triton"),
        CompileCounterWithBackend("aot_eager"),
    )
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    counts = []
    for batch, time in ((2, 20), (3, 9), (2, 1500), (60, 600), (26, 6400)):
        x, edges = torch.zeros(batch, time, 32), None
        if packed:
            x, edges = x[:1], torch.linspace(0, time, batch + 1).int()
        compiled(x, cu_seqlens=edges).sum().backward()
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1, counts
