from .api import variational_linear_attention

__all__ = ["variational_linear_attention"]
