from .api import mesa

__all__ = ["mesa"]
