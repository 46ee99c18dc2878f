"""`fastweights.testing.check_mixer`: passes every layer, and finds each fault that is planted in one."""

import pytest
import torch
from torch import nn

from fastweights.layers import MIXERS, Mixer
from fastweights.testing import check_mixer
from tests.fast_set import fast_where
from tests.models.mixers import is_fast

from .variants import build


@fast_where(lambda given: is_fast(given["variant"]))
@pytest.mark.parametrize("variant", MIXERS)
def test_every_mixer_keeps_the_contract(variant):
    torch.manual_seed(0)
    check_mixer(build(variant).double())


class Average(Mixer):
    """m_t = rate m_(t-1) + W x_t, y_t = m_t + x_t; the methods are what faults replace."""

    def __init__(self):
        super().__init__()
        self.hidden_size = 4
        self.proj = nn.Linear(4, 4)

    def forward(self, x, cache=None, cu_seqlens=None):
        edges = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        count = len(x) if cu_seqlens is None else len(edges) - 1
        before = {} if cache is None else cache.memory
        m = before.get("m", x.new_zeros(count, 4)).clone()
        outputs = []
        w = self.project(x)
        for n, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
            rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
            for t in range(a, b):
                m[rows] = self.step(m[rows], w[:, t])
                outputs.append(m[rows] + x[:, t])
        if cache is not None:
            self.keep(cache, m)
        return self.finish(torch.stack(outputs, 1))

    def project(self, x):
        return self.proj(x)

    def step(self, m, w):
        return 0.9 * m + w

    def keep(self, cache, m):
        cache.update({"m": m}, {})

    def finish(self, y):
        return y

    def state_size(self, length=1):
        return 4


def test_a_sound_mixer_passes():
    torch.manual_seed(0)
    layer = Average()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for precise in (layer, layer.double()):
        check_mixer(precise)
    assert all(torch.equal(tensor.double(), layer.state_dict()[name]) for name, tensor in before.items())
    assert layer.proj.weight.grad is None


FAULTS = {
    "reading with a cache token by token differs: by .* first at token 1 of row 0": {
        "keep": lambda self, cache, m: cache.update({"m": m * 1.001}, {})
    },
    "not causal": {"project": lambda self, x: self.proj(x) + x.mean(1, keepdim=True)},
    "reading a row of a batch alone differs": {"project": lambda self, x: self.proj(x) + x.mean(0, keepdim=True)},
    "no gradient reaches parameter proj.bias": {"project": lambda self, x: x @ self.proj.weight.T},
    "no gradient reaches parameter proj.weight": {"project": lambda self, x: self.proj(x).detach() + self.proj.bias},
    r"state_size\(10\) is 5, the cache's memory holds 4": {"state_size": lambda self, length=1: 5},
    "must keep the dtype torch.float64, got torch.float32": {"finish": lambda self, y: y.float()},
    "must answer in bfloat16, got torch.float32": {
        "finish": lambda self, y: y if y.dtype == torch.float64 else y.float()
    },
    r"cache tensor 'm' must have the 2 sequences as its first dimension, got \[4, 2\]": {
        "keep": lambda self, cache, m: cache.update({"m": m.T.contiguous()}, {})
    },
    "the cache is empty": {
        "keep": lambda self, cache, m: None,
        "step": lambda self, m, w: w,
    },
    "must be a tensor of the input's shape": {"finish": lambda self, y: y[:, :-1]},
    "the output is not finite": {"finish": lambda self, y: y / 0},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_found(message):
    torch.manual_seed(0)
    faulty = type("Faulty", (Average,), FAULTS[message])()
    with pytest.raises(AssertionError, match=message):
        check_mixer(faulty.double())


def packs_without_edges(self, x, cache=None, cu_seqlens=None):
    return Average.forward(self, x, cache, cu_seqlens if cache is not None else None)


def forgets_the_order(self, x, cache=None, cu_seqlens=None):
    """Packed sequences continue from the states of others."""
    if cache is not None and cu_seqlens is not None and cache.memory:
        cache.apply(lambda tensor: tensor.flip(0))
    return Average.forward(self, x, cache, cu_seqlens)


def writes_in_place(self, x, cache=None, cu_seqlens=None):
    before = None if cache is None else cache.memory.get("m")
    y = Average.forward(self, x, cache, cu_seqlens)
    if before is not None:
        before.copy_(cache.memory["m"])
    return y


def keeps_the_rows(self, x, cache=None, cu_seqlens=None):
    """Remembers the order of rows beside the cache, as a layer that holds its state itself would."""
    if cache is not None and cache.memory and cu_seqlens is None and x.shape[1] > 1:
        cache.memory = {"m": self.own if len(self.own) == len(x) else cache.memory["m"]}
    y = Average.forward(self, x, cache, cu_seqlens)
    if cache is not None:
        self.own = cache.memory["m"].clone()
    return y


@pytest.mark.parametrize(
    "forward, message",
    [
        (packs_without_edges, "reading packed sequences differs"),
        (forgets_the_order, "reading packed sequences on from a cache differs"),
        (writes_in_place, "cache tensor 'm' was written into"),
        (keeps_the_rows, "sequences in another order differs"),
    ],
)
def test_a_fault_of_packing_or_cache_is_found(forward, message):
    torch.manual_seed(0)
    faulty = type("Faulty", (Average,), {"forward": forward})()
    with pytest.raises(AssertionError, match=message):
        check_mixer(faulty.double())


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match=r"layer must be a fastweights\.layers\.Mixer, got Linear"):
        check_mixer(nn.Linear(2, 2))
    layer = Average()
    del layer.hidden_size
    with pytest.raises(ValueError, match="hidden_size must be given"):
        check_mixer(layer)
    check_mixer(layer, hidden_size=4)
    with pytest.raises(ValueError, match="length must be a whole number from 8 to 65536, got 7"):
        check_mixer(layer, hidden_size=4, length=7)


def test_the_tolerance_is_the_callers():
    torch.manual_seed(0)
    faulty = type("Faulty", (Average,), FAULTS[next(iter(FAULTS))])().double()
    check_mixer(faulty, tolerance=0.1)
