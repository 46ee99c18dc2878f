from .api import precondition_keys, precondition_queries

__all__ = ["precondition_keys", "precondition_queries"]
