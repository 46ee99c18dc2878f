"""The memory of both Palimpsa layers: with importances or, without metaplasticity, the linear attention that is left."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_flag, check_number, check_positive
from ..ops import linear_attention, palimpsa
from .memory_layer import RuleCall
from .options import MixerOptions, option

__all__ = ["PosteriorOptions", "read_posterior"]


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions(MixerOptions):
    """Options of both Palimpsa layers.

    Args:
        metaplasticity: whether importances are kept; without them the layer has no beta.
        prior: p, importance before any key, positive. Without metaplasticity it still divides the answer.
        b_scale: first value of b, one learned number per head.
        residual: whether D v, with one learned D per head, is added to the answer.
        long_memory: whether the first decays are those of the paper's recall task (A from 0.01 to 0.16 and dt from 1e-3 to
            1e-1 over the heads) and not Mamba-2's (A uniform in [0, 16], dt log-uniform).
    """

    metaplasticity: bool = option(True, check_flag)
    prior: float = option(1.0, check_positive)
    b_scale: float = option(1.0, check_number)
    residual: bool = option(True, check_flag)
    long_memory: bool = option(False, check_flag)


def read_posterior(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    write_BTGV: Tensor,
    beta_BTGV: Tensor | None,
    g_BTG: Tensor,
    run: RuleCall,
    *,
    prior: float,
    scale: float,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Answers [B, T, G, V] and the memory after them: M and J, or S when beta is None, which stands for beta = 0."""
    if beta_BTGV is None:
        return run(linear_attention, q_BTHK, k_BTHK, write_BTGV, g_BTG, scale=scale / prior, state=("S",))
    return run(palimpsa, q_BTHK, k_BTHK, write_BTGV, beta_BTGV, g_BTG, prior=prior, scale=scale, state=("M", "J"))
