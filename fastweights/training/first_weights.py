"""First weights that two models of one seed share where they have the same modules."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

__all__ = ["draw_by_name"]


def draw_by_name(model: Any, seed: int) -> None:
    """Draw the first values of every module of one of our models anew, from a random state of the seed and the module's name.

    Modules of the same name, class and sizes have the same values in every model, whatever is in front of them. The models of a
    comparison differ so in their mixers alone, and a difference between them is paired by the seed. torch's random state stays
    as it is.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
            model._init_weights(module)
