"""The ops of this library as a backend of flash-linear-attention, of which nothing is imported before `register()`: enters the
registries that it asks for a backend at each call, and leaves them."""

from __future__ import annotations

import os
import sys

from ... import environment

__all__ = ["register", "unregister"]

TESTED = "0.6"
INSTALL = f"install flash-linear-attention {TESTED}: pip install 'flash-linear-attention=={TESTED}.*'"
NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"


def register() -> None:
    """Let `chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention run on the ops of this library.

    Every caller of them is served, layers and models of flash-linear-attention and of other libraries alike, whether imported
    before or after. A call that the ops do not take runs as before (docs/transformers.md lists these), and so does every call
    while the environment variable FLA_FASTWEIGHTS is 0. A second call does no harm.

    Raises:
        ValueError: flash-linear-attention is missing or of a version that was not tested, or the environment variable
            FLA_DISABLE_BACKEND_DISPATCH turns its backends off.
    """
    found = environment.installed_version("fla-core")  # the package with its ops
    environment.check_version("flash-linear-attention", found, TESTED, INSTALL)
    if os.environ.get(NO_DISPATCH) == "1":
        raise ValueError(
            f"{NO_DISPATCH} must not be 1 in the environment, as flash-linear-attention then asks no backend; unset it and "
            "start Python again"
        )
    from .backend import enter

    enter()


def unregister() -> None:
    """Let all calls run as before `register()`, also where that was never called."""
    module = sys.modules.get(f"{__package__}.backend")
    if module is not None:
        module.leave()
