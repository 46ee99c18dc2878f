"""The name of the cache: `past_key_values`, or `cache`, as transformers 5.24 renamed it. The models take both."""

from __future__ import annotations

from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

__all__ = ["CACHE_NAME", "CACHE_NAMES", "given_cache", "named_cache"]

CACHE_NAMES = ("past_key_values", "cache")
# What the installed transformers calls it, in its outputs and within generate().
CACHE_NAME = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)


def given_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that was given under either name, or None.

    Raises:
        ValueError: two caches.
    """
    if cache is None or cache is past_key_values:
        return past_key_values
    if past_key_values is None:
        return cache
    raise ValueError("cache must be None where past_key_values is given, both are the cache; pass one of them")


def named_cache(cache: Any) -> dict[str, Any]:
    """The cache as a field of an output of transformers."""
    return {CACHE_NAME: cache}
