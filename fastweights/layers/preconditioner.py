"""The key preconditioner of the delta rules and of linear attention: its options, its parameters, its write keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_number, check_positive
from ..ops import precondition_keys
from .gates import PreconditionerGates
from .initialization import OwnInitialValues
from .memory_layer import Answer, RuleCall
from .options import DecayOptions, one_of, option

__all__ = ["KeyPreconditioner", "PreconditionerOptions"]

# The factors of a write key lie in [1/x, x], [1, x] or [1/x, 1]: powers of x^(1/2) times this power of x in the last two.
INTERVALS = {"symmetric": 0.0, "amplify": 0.5, "dampen": -0.5}


def check_bound(name: str, value: object) -> float:
    """The check of the preconditioner's bound."""
    if not 1 <= check_number(name, value) <= 2:
        raise ValueError(f"{name} must be in [1, 2], beyond which the memory can grow without end, got {value}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PreconditionerOptions(DecayOptions):
    """Options of the layers whose keys or queries may be preconditioned.

    Args:
        tie_preconditioner: whether A has the decay and gain of the memory; otherwise it has projections of its own.
        bound: of a key preconditioner, x in [1, 2]; 1 leaves the keys as they are.
        interval: where the factors of its write keys lie: "symmetric" [1/x, x], "amplify" [1, x] or "dampen" [1/x, 1], which
            Preconditioned DeltaNet's appendix E.3 finds worse.
        center: first value of its learned centre of log A.
        squash: how it squashes log A, "softsign" or "tanh", or "none" for the paper's unstable form, which has neither bound,
            interval nor centre; see `fastweights.ops.precondition_keys`.
        ridge: positive number added to A by a query preconditioner and by squash "none".
    """

    tie_preconditioner: bool = option(False, check_flag)
    bound: float = option(1.5, check_bound)
    interval: str = option("symmetric", one_of(*INTERVALS))
    center: float = option(-0.2, check_number)
    squash: str = option("softsign", one_of(*precondition_keys.spec.options["squash"].values))
    ridge: float = option(0.1, check_positive)

    def check_together(self) -> None:
        super().check_together()
        if self.tie_preconditioner and getattr(self, "decay", None) == "channel":
            raise ValueError("tie_preconditioner must be False with decay 'channel': A has one decay per head")
        if self.squash == "none" and self.interval != "symmetric":
            raise ValueError(
                f"interval must be 'symmetric' with squash 'none', which has no bound, got {self.interval!r}"
            )


class KeyPreconditioner(OwnInitialValues):
    """Gates, centre (one number per head, free in sign), bound and factor that turn keys into write keys."""

    _no_weight_decay = ("center",)

    def __init__(self, hidden_size: int, num_heads: int, options: PreconditionerOptions) -> None:
        super().__init__()
        self.options = options
        self.bound = options.bound if options.interval == "symmetric" else options.bound**0.5
        self.factor = options.bound ** INTERVALS[options.interval]
        self.gates = PreconditionerGates(hidden_size, num_heads, options.tie_preconditioner)
        self.center = None if options.squash == "none" else nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {} if self.center is None else {"center": torch.full_like(self.center, self.options.center)}

    def forward(self, run: RuleCall, op: Any, *inputs: Any, **options: Any) -> Answer:
        """What run(op, *inputs, **options) gives with this centre and bound."""
        center = 0.0 if self.center is None else self.center
        return run(op, *inputs, center=center, bound=self.bound, **options)

    def write_keys(self, k_BTHK: Tensor, g: Tensor, beta: Tensor, run: RuleCall) -> Answer:
        """w [B, T, G, K] and A by name, for the log decay and the gain of A."""
        settings = {"squash": self.options.squash, "ridge": self.options.ridge}
        w_BTGK, memory = self(run, precondition_keys, k_BTHK, g, beta, **settings)
        return self.scaled(w_BTGK), memory

    def scaled(self, x: Tensor) -> Tensor:
        """x times the factor."""
        return x if self.factor == 1 else self.factor * x
