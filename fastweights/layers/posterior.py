"""What both Palimpsa layers share: a memory with importances or, without metaplasticity, the linear attention that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checks import check_flag, check_number, check_positive
from ..ops import linear_attention, palimpsa
from ..ops.authoring import Op, State, gated_writes
from .gates import ImportanceGain
from .memory_layer import Answer, OpLayer, RuleCall
from .options import DecayOptions, one_of, option
from .projections import ValueSkip, backend_beside

__all__ = ["PosteriorLayer", "PosteriorOptions"]


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


class PosteriorLayer(OpLayer):
    """A layer whose memory is that of `fastweights.ops.palimpsa`, or of `linear_attention` without metaplasticity."""

    options: PosteriorOptions

    @classmethod
    def choose_op(cls, options: Any) -> Op[..., Any]:
        return palimpsa if options.metaplasticity else linear_attention

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        return cls.choose_op(options).spec.states

    def build_importance(self) -> None:
        """Create the gain of the importance and the skip D v, each None where the options leave it out."""
        options, heads = self.options, self.heads
        self.importance = None
        if options.metaplasticity:
            self.importance = ImportanceGain(
                self.hidden_size, heads.value_heads, heads.value, options.b_scale, options.beta_init
            )
        self.skip = ValueSkip(heads.value_heads, options.skip_init) if options.residual else None

    def gate_writes(self, x_BTD: Tensor, v_BTGV: Tensor, s_BTG: Tensor, backend: str) -> tuple[Tensor, Tensor | None]:
        """What is written, s v, and its gain in importance [B, T, G, V] (None without importance), both in v's dtype."""
        z_BTGV, c_BTG = (None, None) if self.importance is None else self.importance(x_BTD, s_BTG)
        return gated_writes(v_BTGV, s_BTG, z_BTGV, c_BTG, backend=backend_beside(backend))

    def read_posterior(
        self, run: RuleCall, q: Tensor, k: Tensor, write: Tensor, beta: Tensor | None, g: Tensor, scale: float
    ) -> Answer:
        """Answers [B, T, G, V] and the memory after them. beta None stands for beta = 0."""
        op, prior = self.choose_op(self.options), self.options.prior
        if beta is None:
            return run(op, q, k, write, g, scale=scale / prior)
        return run(op, q, k, write, beta, g, prior=prior, scale=scale)
