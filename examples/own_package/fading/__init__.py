"""A memory rule with Triton kernels: linear attention that forgets the same part at every token, padding left out."""

import math

import torch

from fastweights.layers import MemoryLayer, register_mixer
from fastweights.ops import register_op
from fastweights.ops.authoring import (
    Case,
    Chunks,
    KernelFamily,
    Number,
    OpSpec,
    Output,
    State,
    call,
    chunkwise,
    kernels,
    op,
    roles,
    sequential,
    stack_time,
)


# Token by token: q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H], S [N, H, K, V].
def reference(q, k, v, beta, S, keep):
    outputs = []
    for t in range(v.shape[1]):
        S = keep * S + beta[:, t, :, None, None] * k[:, t, ..., None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    return stack_time(outputs, v), (S,)


# In M chunks of C tokens: [M, H, C, ...].
def chunked(q, k, v, beta, S, sequences, keep):
    chunks = Chunks(sequences, 64, v.device)
    Q, K, V = (chunks.split(x) for x in (q, k, beta[..., None] * v))
    # Padding writes nothing, as its values are 0. But it would forget: so each token brings its own log decay, and padding has 0.
    log = chunks.split(torch.full_like(beta, math.log(keep))).cumsum(-1)
    between = (log[..., :, None] - log[..., None, :]).tril().exp().tril()
    decay, written = log[..., -1:, None].exp(), (K * (log[..., -1:] - log)[..., None].exp()).mT @ V
    (start,), final = chunks.accumulate((S,), decay, written)
    o = (Q * log[..., None].exp()) @ start + (Q @ K.mT * between) @ V
    return chunks.merge(o), final


def load_kernels():
    from .kernels import FADING, FadingInputs  # here: Triton is imported at the first launch

    return KernelFamily(FADING, FadingInputs, {"scale": 1.0, "keep": 1.0})


SPEC = OpSpec(
    name="fading_attention",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.GAIN},
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE, "keep": Number(above=0.0, high=1.0)},
    backends={
        "reference": sequential(reference), "torch": chunkwise(chunked), "triton": kernels(load_kernels, widest=64),
    },
    cases={"": Case(), "slow": Case(options={"keep": 0.99})},
    equation="S = keep S + beta k v^T; o = S^T q",
)  # fmt: skip


@register_op
@op(SPEC)
def fading_attention(
    q, k, v, beta, *, scale=None, keep=0.9, initial_state=None, output_final_state=False, cu_seqlens=None, backend="auto"
):  # fmt: skip
    """Linear attention with one gain per head and token, which keeps the part `keep` of its memory at every token."""
    options = {"scale": scale, "keep": keep}
    return call(SPEC, (q, k, v, beta), options, initial_state, output_final_state, cu_seqlens, backend)


@register_mixer("fading", summary="a memory that fades", equation=SPEC.equation, source="examples")
class Fading(MemoryLayer):
    """Linear attention that forgets a fixed part at every token."""

    op = fading_attention

    def build(self):
        self.gain = torch.nn.Linear(self.hidden_size, self.heads.value_heads)

    def rule(self, x, q, k, v, run):
        return run(self.op, q, k, v, self.gain(x).sigmoid())
