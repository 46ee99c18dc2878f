"""A name that the kernels' nodes import."""

from .node import without_aliases as owned

__all__ = ["owned"]
