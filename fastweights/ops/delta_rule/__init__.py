from .api import delta_rule

__all__ = ["delta_rule"]
