"""Fast-weight memory layers: constant-memory replacements for softmax attention.

The rules are functions in `fastweights.ops`, the layers around them in `fastweights.layers`, language models in
`fastweights.models`, recall tasks in `fastweights.data`.
"""

from . import ops
from ._version import __version__

__all__ = ["__version__", "ops"]
