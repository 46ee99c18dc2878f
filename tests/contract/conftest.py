"""The backends that golden values are compared on."""

from fastweights.testing.contract import backend

__all__ = ["backend"]
