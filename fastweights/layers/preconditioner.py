"""The preconditioners of the delta rules and of linear attention: their options, their parameters, the write keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag, check_number, check_positive
from ..ops import precondition_keys
from ..ops.authoring import expand_heads
from .gates import PreconditionerGates
from .initialization import OwnInitialValues
from .memory_layer import Answer, RuleCall
from .norms import at_least_float32
from .options import DecayOptions, one_of, option
from .shared_input import InputProducts, plain_products, project

__all__ = [
    "SIDES",
    "KeyPreconditioner",
    "LearntWriteKey",
    "PreconditionerOptions",
    "build_preconditioner",
    "find_gates",
]

# What a preconditioner scales.
SIDES = {None: (), "key": ("key",), "query": ("query",), "both": ("key", "query")}

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
        preconditioner: None; "key": tokens are written along the write keys w of `fastweights.ops.precondition_keys` in place of
            k; "query": the memory is read with q / (A + ridge), A the running energy of the key channels; "both": w and
            q / (A + ridge) with one A, the combination that Preconditioned DeltaNet names next (appendix B).
        tie_preconditioner: whether A has the decay and gain of the memory; otherwise it has projections of its own.
        bound: of a key preconditioner, x in [1, 2]; 1 leaves the keys as they are.
        interval: where the factors of its write keys lie: "symmetric" [1/x, x], "amplify" [1, x] or "dampen" [1/x, 1], which
            Preconditioned DeltaNet's appendix E.3 finds worse.
        center: first value of its learned centre of log A.
        squash: how it squashes log A, "softsign" or "tanh", or "none" for the paper's unstable form, which has neither bound,
            interval nor centre; see `fastweights.ops.precondition_keys`.
        ridge: positive number added to A by a query preconditioner and by squash "none".
    """

    preconditioner: str | None = option(None, one_of(*SIDES))
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

    @property
    def learns_decay(self) -> bool:
        has_energy = self.preconditioner is not None and not self.tie_preconditioner
        return super().learns_decay or (has_energy and self.energy_memory == "windows")

    @property
    def energy_memory(self) -> str:
        """`long_memory` of the decay of A, which the ramps of Palimpsa leave at Mamba-2's first values."""
        return "windows" if self.long_memory in (None, "windows") else "own"

    @property
    def power_range(self) -> tuple[float, float]:
        """b and f, with which the factors of write keys are f b^s for s in [-1, 1]."""
        return self.bound if self.interval == "symmetric" else self.bound**0.5, self.bound ** INTERVALS[self.interval]


class KeyPreconditioner(OwnInitialValues):
    """Makes write keys of keys: gates, a centre (one number per head, of either sign), a bound and a factor."""

    _no_weight_decay = ("center",)

    def __init__(self, hidden_size: int, num_heads: int, options: PreconditionerOptions) -> None:
        super().__init__()
        self.options = options
        self.bound, self.factor = options.power_range
        self.gates = PreconditionerGates(hidden_size, num_heads, options.tie_preconditioner, options.energy_memory)
        self.center = None if options.squash == "none" else nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {} if self.center is None else {"center": torch.full_like(self.center, self.options.center)}

    def forward(self, run: RuleCall, op: Any, *inputs: Any, **options: Any) -> Answer:
        """Call run(op, *inputs, **options) with this centre and bound."""
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


class LearntWriteKey(nn.Module):
    """w = f b^s k with s = squash(w_proj x), one number per key channel, and b, f of `PreconditionerOptions.power_range`.

    Preconditioned DeltaNet (section 4.1) mentions write keys that are learnt directly, without the running energy, and prints
    no form. This form is that of its section 3.5 with a projection in place of log A - c. The factors keep their bound, and
    with it the eigenvalue 1 - beta w.k of a write. With a w of any direction products of writes can grow without end, even
    where each eigenvalue lies in the unit disc (docs/rules.md).
    """

    def __init__(self, hidden_size: int, num_heads: int, channels: int, options: PreconditionerOptions) -> None:
        super().__init__()
        self.bound, self.factor = options.power_range
        self.squash = {"softsign": F.softsign, "tanh": torch.tanh}[options.squash]
        self.w_proj = nn.Linear(hidden_size, num_heads * channels, bias=False)

    def input_products(self) -> InputProducts:
        return plain_products(self.w_proj)

    def forward(self, x_BTD: Tensor, k: Tensor) -> Tensor:
        """w of the shape of the keys k, [B, T, H or G, K]."""
        r_BTHK = at_least_float32(project(x_BTD, self.w_proj)).unflatten(2, (-1, k.shape[3]))
        factors = self.factor * (math.log(self.bound) * self.squash(r_BTHK)).exp()
        return (expand_heads(factors, k.shape[2]) * k).to(k.dtype)


def build_preconditioner(
    hidden_size: int, num_heads: int, options: PreconditionerOptions
) -> KeyPreconditioner | PreconditionerGates | None:
    """The module of the option `preconditioner`: a `KeyPreconditioner` where keys are preconditioned, its gates alone where
    only queries are, None without one."""
    if options.preconditioner is None:
        return None
    if "key" in SIDES[options.preconditioner]:
        return KeyPreconditioner(hidden_size, num_heads, options)
    return PreconditionerGates(hidden_size, num_heads, options.tie_preconditioner, options.energy_memory)


def find_gates(module: Any, options: PreconditionerOptions) -> Any:
    """The gates of the module that `build_preconditioner` made, None without one. The option decides, because an adapter may
    wrap the module."""
    return module.gates if "key" in SIDES[options.preconditioner] else module
