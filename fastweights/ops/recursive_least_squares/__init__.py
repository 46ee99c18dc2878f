from .api import recursive_least_squares

__all__ = ["recursive_least_squares"]
