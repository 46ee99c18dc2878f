"""torch.compile of layers with states of their own kind: one graph, packed rows and decoding included."""

import pytest
import torch

from fastweights.layers import LayerCache

from .variants import HIDDEN, build


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("palimpsa-m", "lattice similarity")),
        "gka sketch",
        "vla refresh",
    ],
)
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
