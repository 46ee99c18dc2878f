"""The kernels on clusters in the place of the two kernels of the library that pass tokens one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fastweights.kernels.common.call import make_rule
from fastweights.kernels.sphere.decode_steps import decode_tokens, decode_tokens_back
from fastweights.kernels.sphere.rule import Sphere
from fastweights.ops import lattice
from fastweights.ops.framework.spec import spec_of

__all__ = ["on_clusters"]


@contextmanager
def on_clusters(parts: int, mbarrier: bool) -> Iterator[None]:
    """Inside, `lattice` with backend "triton" takes the kernels of this package for the decode objective with slots of length 1.

    Args:
        parts: programs of a cluster, 2 or 4. Inputs have 64 or 128 key channels, as many value channels, and 16 bits.
        mbarrier: whether numbers are sent by `st.async` and counted by mbarriers, see exchanges.py.
    """
    from .backward import decode_back_on_cluster  # these need Gluon
    from .forward import decode_on_cluster

    replaced = {decode_tokens: decode_on_cluster, decode_tokens_back: decode_back_on_cluster}

    class OnClusters(Sphere):
        def set_up(self) -> None:
            super().set_up()
            # One flag per block and head, and one part of the gradients of the gates.
            self.layout = self.decode_layout = {"W": 1}

        def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            if kernel in replaced:
                kernel = replaced[kernel]
                constants = {"PARTS": parts, "MBARRIER": mbarrier, "num_ctas": parts, "num_warps": self.K // 32}
            super().launch(kernel, grid, *arguments, **constants)

    backend = spec_of(lattice).backends["triton"]
    with mock.patch.object(backend, "family", backend.family._replace(rule=make_rule(OnClusters))):
        yield
