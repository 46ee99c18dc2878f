from .api import linear_attention

__all__ = ["linear_attention"]
