from .api import short_convolution

__all__ = ["short_convolution"]
