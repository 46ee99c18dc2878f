"""A memory rule of one's own: a fast and a slow memory of the same keys and values, mixed when they are read."""

import torch
from torch import nn

from fastweights.layers import MemoryLayer, register_mixer
from fastweights.layers.decay import HeadDecay
from fastweights.ops import register_op
from fastweights.ops.authoring import Case, OpSpec, Output, State, call, chunkwise, op, roles, sequential, stack_time
from fastweights.ops.authoring import linear_attention_by_chunks as linear_attention


# Token by token: q, k [B, T, H, K], v [B, T, H, V], the others [B, T, H].
def reference(q, k, v, fast, slow, mix, F, S):
    outputs = []
    for t in range(v.shape[1]):
        written = k[:, t, ..., None] * v[:, t, :, None, :]
        F = fast[:, t].exp()[..., None, None] * F + written
        S = slow[:, t].exp()[..., None, None] * S + written
        memory = torch.lerp(S, F, mix[:, t][..., None, None])
        outputs.append((q[:, t, :, None, :] @ memory).squeeze(-2))
    return stack_time(outputs, v), (F, S)


# The same in matrix products.
def chunked(q, k, v, fast, slow, mix, F, S, sequences):
    from_fast, (F,) = linear_attention(q, k, v, fast, F, sequences)
    from_slow, (S,) = linear_attention(q, k, v, slow, S, sequences)
    return torch.lerp(from_slow, from_fast, mix[..., None]), (F, S)


SPEC = OpSpec(
    name="two_speed_attention",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "fast": roles.LOG_DECAY, "slow": roles.LOG_DECAY,
        "mix": roles.TOKEN_GAIN,
    },
    states={"F": State("GKV", by_column=True), "S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked)},
    cases={"": Case()},
    equation="F = f F + k v^T; S = s S + k v^T; o = (m F + (1 - m) S)^T q",
)  # fmt: skip


@register_op
@op(SPEC)
def two_speed_attention(
    q, k, v, fast, slow, mix, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, backend="auto"
):  # fmt: skip
    """Two linear attentions with log decays `fast` and `slow`, one per head, and one mix per head and token."""
    tensors, options = (q, k, v, fast, slow, mix), {"scale": scale}
    return call(SPEC, tensors, options, initial_state, output_final_state, cu_seqlens, backend)


@register_mixer("two-speed", summary="a fast and a slow memory", equation=SPEC.equation, source="examples")
class TwoSpeed(MemoryLayer):
    """Linear attention in two memories, each with one learned decay per head."""

    op = two_speed_attention

    def build(self):
        heads = self.heads.value_heads
        self.fast, self.slow = HeadDecay(self.hidden_size, heads), HeadDecay(self.hidden_size, heads, "paper")
        self.mix = nn.Linear(self.hidden_size, heads)

    def rule(self, x, q, k, v, run):
        return run(self.op, q, k, v, self.fast(x), self.slow(x), self.mix(x).sigmoid())
