"""The ops of this library as a backend of flash-linear-attention, of which nothing is imported before `register()`."""

from .registration import register, unregister

__all__ = ["register", "unregister"]
