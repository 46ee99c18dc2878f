"""The memory of both Palimpsa layers: with importances or, without metaplasticity, the linear attention that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..checks import check_flag, check_number, check_positive
from ..ops import gated_writes, linear_attention, palimpsa
from .gates import ImportanceGain
from .memory_layer import RuleCall
from .options import DecayOptions, one_of, option
from .projections import backend_beside

__all__ = ["PosteriorOptions", "read_posterior", "write_posterior"]


def number_or_interval(name: str, value: object) -> float | tuple[float, float]:
    """The check that an option is a finite number, or two in rising order."""
    if not isinstance(value, (list, tuple)):
        return check_number(name, value)
    if len(value) != 2 or not check_number(name, value[0]) < check_number(name, value[1]):
        raise ValueError(f"{name} must be a number or [low, high] with low below high, got {value}")
    return float(value[0]), float(value[1])


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions(DecayOptions):
    """Options of both Palimpsa layers.

    Args:
        metaplasticity: whether importances are kept; without them the layer has no beta.
        prior: p, importance before any key, positive. Without metaplasticity it still divides the answer.
        b_scale: first value of b, one learned number per head; or [low, high], between which each head draws its own.
        beta_init: first values of the second matrix of beta's projection, "normal" as a model draws all matrices, or "uniform"
            in +-1/sqrt(rank) as in the authors' released code. A layer by itself has the latter.
        residual: whether D v, with one learned D per head, is added to the answer.
        skip_init: first value of D.
    """

    metaplasticity: bool = option(True, check_flag)
    prior: float = option(1.0, check_positive)
    b_scale: float | Sequence[float] = option(1.0, number_or_interval)
    beta_init: str = option("normal", one_of("normal", "uniform"))
    residual: bool = option(True, check_flag)
    skip_init: float = option(1.0, check_number)


def write_posterior(
    x_BTD: Tensor, v_BTGV: Tensor, s_BTG: Tensor, importance: ImportanceGain | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """What is written, s v, and its gain in importance [B, T, G, V] (None without importance), both in v's dtype."""
    z_BTGV, c_BTG = (None, None) if importance is None else importance(x_BTD, s_BTG)
    return gated_writes(v_BTGV, s_BTG, z_BTGV, c_BTG, backend=backend_beside(backend))


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
