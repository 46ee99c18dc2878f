r"""Linear attention and the delta rules in one pass over the chunks on Hopper GPUs: with one decay per head or none, the delta
rules also with one per key channel.

The mathematics is that of `common.delta_rule`, whose names are used here. Its kernels hand W, U, u and the states of all chunks
to each other through memory. Here a launch per chunk leaves T diag(beta), P and two decays per token (`solve.py`), and a pass per
segment, head and tile of value columns does the rest (`passes.py`). The state S is held transposed, [values, keys], in registers.
W are the write keys: K, unless others are given or made by the preconditioner.

    x = V^T - exp(G) (S K^T)          u = x (T diag(beta))^T          (linear attention: u = V^T, and no T)
    O^T = scale exp(G) (S Q^T) + u P^T
    S <- exp(G_C) S + (exp(G_C - G) u) W

S, x and u are left operands of products, which Hopper's tensor cores read from registers in the layout that products leave, so
nothing that depends on S goes through shared memory. What comes from memory is copied there two chunks ahead.

Long sequences of few heads are cut into segments. `summarize_chunks` finds what a segment does to a state, S -> T S + R, and
every program of the pass takes the state of its sequence through the segments before its own (`segments.py`), in the place of
`combine_segments`. Of linear attention a transition is one decay. Segments so far away that the transitions between let nothing
through are left out (`segments_needed`), and so are chunks of a segment, of which `chunk_growth` bounds what comes through.

T = (I + A)^-1 comes from the inverses X of its diagonal blocks of 16 tokens, by substitution, and from L, what is below them.
With N = X L, the rows of block b are T_b = X_b - sum over a < b of N_ba T_a.

**NaN and infinity.** A token with a bad key or gate makes G NaN from it on, which its rows of T and P take over; rows before it
are computed as if it were 0. A bad value or state spoils its column of S. Products with zeros also spoil, in its column, the
tokens of the chunk before it. The loop does not look for them: a state never loses a NaN, so where the state at a segment's end
has one, the segment is passed again by a loop that does (CAREFUL).

Before a backward the same launches also write T, u and the states that segments start from, and P and the decays are kept.
`states_again` finds the states of all chunks from u (`back.py`). `gradients_back` goes from the last chunk to the first with dS^T
[values, keys] (`gradients_back.py`), without W and what the outputs of a chunk give to u, as W^T du = K^T (beta exp(G) z):

    du = P^T dO + exp(G_C - G) W dS,   z = T^T du                     (linear attention: dV = du, and no term with z)
    dS <- exp(G_C) dS + (scale exp(G) Q)^T dO - (beta exp(G) K)^T z

On its way it finds all gradients of a chunk, dP among them, by the formulas of `chunk_gradients`: what they need, dS and z above
all, is on chip. Segments are joined backwards as forwards, from what `summarize_back` finds, with the transitions of the forward.

**One decay per channel** (`channel.py`). exp(G) then scales rows and channels, and no row alone. With R = G_C / 2 `solve_chunks`
writes exp(G - R) K, exp(G - R) Q and exp(R - G) W, which the passes take for K, Q and W as if nothing decayed but S, by exp(R)
per channel before and after the chunk. They are kept for a backward, where `channel_gradients_back` finds all gradients as
`gradients_back` does, those of these operands first; the gradients of g are sums of those of G from a token on, found as a
product with a triangle of ones. Of channels that lose too much in a chunk for a product of two factors,
`strong_gradients_channel` of `common.delta_rule` finds them.

The kernels are written in Gluon (`runtime/gluon.py`), for bfloat16 and, but for one decay per channel, float16, and for 128 or
64 channels of keys and values. `takes_one_pass` (`launches.py`) says which calls take them; all others take the kernels in plain
Triton.
"""
