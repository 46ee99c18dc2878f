"""The backend that flash-linear-attention asks. This module imports it, and `register()` imports this module."""

from __future__ import annotations

from typing import Any, ClassVar

from fla.backends import BaseBackend
from fla.backends import register as register_backend
from fla.ops.kda import chunk_kda
from torch import Tensor

from .call import Call

__all__ = ["FastWeightsBackend", "enter", "leave"]


def run(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    return Call(*arguments, **options).run()


def verify(*arguments: Any, **options: Any) -> tuple[bool, str | None]:
    """An argument that `Call` does not know is a TypeError, which flash-linear-attention counts as a refusal."""
    reason = Call(*arguments, **options).refusal()
    return reason is None, reason


class FastWeightsBackend(BaseBackend):
    """Asked before the other backends for NVIDIA GPUs, whose priority is 3: who registers this one wants it."""

    backend_type = "fastweights"
    env_var = "FLA_FASTWEIGHTS"
    priority = 1
    registered: ClassVar[bool] = False

    chunk_gated_delta_rule = chunk_kda = staticmethod(run)
    chunk_gated_delta_rule_verifier = chunk_kda_verifier = staticmethod(verify)

    def is_enabled(self) -> bool:
        return self.registered and super().is_enabled()


def enter() -> None:
    """Into the registry of all functions of the gated delta rule, and into that of chunk_kda."""
    FastWeightsBackend.registered = True
    register_backend("gated_delta_rule")(FastWeightsBackend)
    register_backend(chunk_kda)(FastWeightsBackend)


def leave() -> None:
    """A registry has no way out: it keeps a backend that is not enabled."""
    FastWeightsBackend.registered = False
