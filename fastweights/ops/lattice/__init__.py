from .api import lattice

__all__ = ["lattice"]
