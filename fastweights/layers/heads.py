"""How many heads a memory layer has and how wide they are."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import LARGEST_HEAD, check_positive, check_size

__all__ = ["HeadSizes", "head_width"]


def head_width(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    """head_dim, or the even share of hidden_size when it is None."""
    check_size("hidden_size", hidden_size)
    check_size("num_heads", num_heads)
    if head_dim is not None:
        return check_size("head_dim", head_dim)
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_heads, {num_heads}, got {hidden_size}; change one or pass head_dim"
        )
    return hidden_size // num_heads


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a matrix memory: H q/k heads of K channels, G >= H value heads of V channels (H divides G).

    Shape suffixes of the layers: B batch, T time, D hidden_size, H q/k heads, G value heads, K key channels, V value
    channels, N sequences (B, or the number of packed ones), W the convolution's width.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int

    @classmethod
    def choose(
        cls, hidden_size: int, num_heads: int, head_dim: int | None, expand_v: float, num_v_heads: int | None
    ) -> HeadSizes:
        """The sizes that a layer's options give, after a check that they fit each other."""
        key = head_width(hidden_size, num_heads, head_dim)
        value = key * check_positive("expand_v", expand_v)
        if round(value) < 1 or abs(value - round(value)) > 1e-6:  # 49 * (1 / 49) is not 1
            raise ValueError(f"expand_v must give whole value heads, got {expand_v} * {key} = {value}")
        if max(key, value) > LARGEST_HEAD:
            raise ValueError(
                f"head_dim and head_dim * expand_v must be at most {LARGEST_HEAD}, got {key} and {value:g}; use more heads"
            )
        num_v_heads = num_heads if num_v_heads is None else check_size("num_v_heads", num_v_heads)
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads, {num_heads}, got {num_v_heads}")
        return cls(num_heads, num_v_heads, key, round(value))
