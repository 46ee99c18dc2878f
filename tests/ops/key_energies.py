"""The kernel of a few tokens of the diagonal preconditioners, called by itself, and what it must give."""

from __future__ import annotations

from torch import Tensor

from fastweights import ops
from fastweights.ops.framework.decode import update_state
from fastweights.ops.framework.spec import spec_of

FORMS = {
    "queries": ("precondition_queries", {"ridge": 0.3}), "softsign": ("precondition_keys", {"bound": 1.8, "eps": 0.3}),
    "tanh": ("precondition_keys", {"squash": "tanh", "bound": 1.8}),
    "none": ("precondition_keys", {"squash": "none", "ridge": 0.5}),
}  # fmt: skip


def by_kernel(form: str, x: dict[str, Tensor], A: Tensor, edges: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """What the kernel answers; A is overwritten."""
    op, given = getattr(ops, FORMS[form][0]), {**FORMS[form][1], **x}
    spec = spec_of(op)
    options = {"bound": 1.5, "eps": 1e-6, "squash": "softsign", "ridge": 0.1, **given}
    return update_state(
        spec, op, [given[name] for name in spec.inputs], {name: options[name] for name in spec.options}, state=A,
        state_indices=rows, cu_seqlens=edges, backend="triton",
    )  # fmt: skip


def token_by_token(form: str, x: dict[str, Tensor], A: Tensor, edges: Tensor | None) -> tuple[Tensor, Tensor]:
    name, options = FORMS[form]
    given = {**options, **{n: y.cpu().double() if isinstance(y, Tensor) else y for n, y in x.items()}}
    return getattr(ops, name)(
        **given, initial_state=A.cpu().double(), output_final_state=True, backend="reference",
        cu_seqlens=None if edges is None else edges.cpu(),
    )  # fmt: skip
