from .api import gated_kalmanet

__all__ = ["gated_kalmanet"]
