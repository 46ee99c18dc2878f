r"""Linear attention and the delta rules in chunks of C = 64 tokens: the derivation, and what families take from here.

One head; rows are tokens of one chunk. q, k, v, write key w, gain beta, log decay g (none, per head or per channel). S is the
state [K, V] at the chunk's start, G the chunk cumsum of g (`chunk_cumsum`), G_C its last row, and exp(G) scales rows, or rows and
channels. A factor exp(G_i - G_j) of a pair i >= j is written exp(G) .. exp(-G).

The rule  S_t = a_t S_{t-1} + beta_t w_t (v_t - (a_t S_{t-1})^T k_t)^T,  o_t = scale S_t^T q_t  writes u_t = beta_t (v_t - ..)
along w_t. Unrolled from the chunk's start,

    u = diag(beta) (V - exp(G) K S - tril(exp(G) K (exp(-G) W)^T, -1) u)

which is linear in u and solved once per chunk (WY transform, `wy_transform`):

    A = tril(diag(beta) exp(G) K (exp(-G) W)^T, -1),  T = (I + A)^-1,  U = T diag(beta) V,  X = T diag(beta) exp(G) K
    u = U - X S                                                            (the code calls X `W`; linear attention: u = V)

The state pass (`chunk_state`) carries S from chunk to chunk, and `chunk_output` reads, all chunks in parallel:

    S <- exp(G_C) S + (exp(G_C - G) W)^T u
    O = scale exp(G) Q S + P u,   P = scale tril(exp(G) Q (exp(-G) W)^T)

Long sequences are cut into segments. A segment takes S to Tr S + R; passes from zero give R, from the identity the transition Tr
(linear attention: a log decay), and `combine_segments` finds the state that each segment starts from, so that segments run in
parallel.

Backwards, with dS the gradient of the state at a chunk's end (`value_grads`, `chunk_state_backward`, `chunk_gradients`):

    du = P^T dO + exp(G_C - G) W dS,   z = T^T du,   dS <- exp(G_C) dS + (scale exp(G) Q)^T dO - X^T du
    dP = tril(dO u^T),   dV = beta z,   dA = -tril(z u^T, -1)
    dQ, dK, dW from dP and dA and, through the state, from dO S^T, u dS^T, z S^T
    dG = <q, dq> - <w, dw> + <k, dk>, at the last token also what the chunk's decay does to the state; dg is its reverse cumsum

T, u, G and the states at the segments' starts are kept for the backward; everything else is computed again.

Decays are clamped at exp(-40) per token and summed in base 2 in float32; with a decay per channel a pair's factor comes from one
product where the chunk loses less than 2^-128, and otherwise by halves (`channel_decay.py`). A NaN or an infinity spoils its own
column, row or head from its token on, never what came before.

`DeltaRule` (launches.py) has these launches as methods. The calls of `chunk`, which computes the rules, are derived from it, and
those of families whose rule asks such a memory: `ridge`, `output_normalized_ttt`, and variational linear attention of
`inverse_gram`.
"""
