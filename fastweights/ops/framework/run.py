"""Names that the layers import; they go to spec.py and checks.py."""

from .checks import compute_dtype
from .spec import BACKENDS

__all__ = ["BACKENDS", "compute_dtype"]
