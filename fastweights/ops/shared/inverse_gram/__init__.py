"""The inverse of a (fading) Gram matrix at every token: what `recursive_least_squares` and `variational_linear_attention`
share."""

from .api import apply_inverse_gram

__all__ = ["apply_inverse_gram"]
