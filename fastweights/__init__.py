"""Fast-weight memory layers: constant-memory replacements for softmax attention.

The rules are functions in `fastweights.ops`, the layers around them in `fastweights.layers`, language models in
`fastweights.models` (importing it makes transformers' Auto classes know them), recall tasks in `fastweights.data`.
"""

from importlib import import_module
from types import ModuleType

from ._version import __version__

__all__ = ["__version__", "analysis", "data", "distributed", "evaluation", "layers", "models", "ops", "training"]


def __getattr__(name: str) -> ModuleType:
    """Load the packages when they are first used: torch and transformers take seconds to import."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
