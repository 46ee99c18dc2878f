"""The kernel of a few tokens of the diagonal preconditioners, called by itself, and what it must give."""

from __future__ import annotations

from torch import Tensor

from fastweights import ops

FORMS = {
    "queries": ("precondition_queries", {"ridge": 0.3}), "softsign": ("precondition_keys", {"bound": 1.8, "eps": 0.3}),
    "tanh": ("precondition_keys", {"squash": "tanh", "bound": 1.8}),
    "none": ("precondition_keys", {"squash": "none", "ridge": 0.5}),
}  # fmt: skip


def by_kernel(form: str, x: dict[str, Tensor], A: Tensor, edges: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """What the kernel answers; A is overwritten."""
    op, options = FORMS[form]
    given = {**options, **x}
    return getattr(ops, op).in_place(**given, state=A, state_indices=rows, cu_seqlens=edges, backend="triton")


def token_by_token(form: str, x: dict[str, Tensor], A: Tensor, edges: Tensor | None) -> tuple[Tensor, Tensor]:
    name, options = FORMS[form]
    given = {**options, **{n: y.cpu().double() if isinstance(y, Tensor) else y for n, y in x.items()}}
    return getattr(ops, name)(
        **given, initial_state=A.cpu().double(), output_final_state=True, backend="reference",
        cu_seqlens=None if edges is None else edges.cpu(),
    )  # fmt: skip
