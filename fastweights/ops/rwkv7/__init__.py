"""What stands around RWKV-7's memory, of one token per sequence where no gradient is needed: one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient, overwrites_states

__all__ = ["erase_keys", "read_answers", "takes_rwkv7", "token_mix"]

SMALLEST_LENGTH = 1e-12  # that a direction is divided by, as in torch.nn.functional.normalize


def takes_rwkv7(x: Tensor, *parameters: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels serve x [N, 1, D] and these parameters: no gradients, no autocast, no graph that is traced, not in
    float64."""
    given = {str(place): y for place, y in enumerate((x, *parameters))}
    return (
        not torch.compiler.is_compiling()
        and takes_kernels(backend, x)
        and x.shape[1] == 1
        and not any(y.dtype == torch.float64 for y in given.values())
        and not torch.is_autocast_enabled(x.device.type)
        and not needs_gradient(given)
    )


def token_mix(x: Tensor, before: Tensor | None, mix: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Streams x + mix (before - x) [S, N, 1, D] for x, before [N, 1, D] and mix [S, D], with before 0 where it is None. With
    `keep` also the `before` of the next call. Within `overwriting_states` it overwrites the given one."""
    from ...kernels.pointwise.rwkv7 import token_mix

    return token_mix(x, before, mix, keep, overwrites_states())


def erase_keys(k: Tensor, rate: Tensor, erase: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""a = -kappa, b = rate kappa and k (1 + share (rate - 1)) in the dtype of k [N, 1, H, K], with kappa = unit(erase k). rate
    [N, 1, H, K]; erase, share [H, K]."""
    from ...kernels.pointwise.rwkv7 import erase_keys

    return erase_keys(k, rate, erase, share, SMALLEST_LENGTH)


def read_answers(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, rho: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    r"""(norm(o) + (q . rho k) v) gate, [N, 1, H K] in the dtype of v: answers, queries, keys, values and gates [N, 1, H, K], a
    norm by mean and variance of each head with weight and bias [H K], and rho [H, K]."""
    from ...kernels.pointwise.rwkv7 import read_answers

    return read_answers(o, q, k, v, gate, rho, weight, bias, eps)
