from .api import output_normalized_ttt

__all__ = ["output_normalized_ttt"]
