from .api import preconditioned_delta_rule

__all__ = ["preconditioned_delta_rule"]
