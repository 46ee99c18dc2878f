r"""Palimpsa's memory, the mean and importance of an elementwise Gaussian posterior: the derivation that the kernels share.

One head; p is the prior, I = J + p the importance, a = exp(g) the decay of a token:

    M_t = a_t M_{t-1} + k_t v_t^T        J_t = a_t J_{t-1} + k_t^2 beta_t^T
    o_t = (M_t / I_t)^T q_t              variance_t = (1 / I_t)^T q_t^2           (q scaled)

The division is elementwise, so no matrix product reads a token. A program holds a tile of M and J in registers (`tile.py`) and
steps through the tokens of a segment (`read_posterior`, read.py). The states that segments start from are two linear-attention
memories, keys k and k^2, found for all chunks by matrix products (`posterior_state`, state.py) and joined by `combine_segments`.

Backwards (`posterior_gradients`, gradients.py), with r = 1 / I, X = M r, do and dw the gradients of o and the variance:

    P_t = q_t do_t^T r_t                 W_t = P_t X_t + q_t^2 dw_t^T r_t^2
    dM_t = a_{t+1} dM_{t+1} + P_t        dJ_t = a_{t+1} dJ_{t+1} - W_t
    dq_t = X_t do_t + 2 q_t (r_t dw_t)   dk_t = dM_t v_t + 2 k_t (dJ_t beta_t)
    dv_t = dM_t^T k_t                    dbeta_t = dJ_t^T k_t^2                   dp = -sum_t sum W_t

The decay's gradient is dg_t = <a_t dM_t, M_{t-1}> + <a_t dJ_t, J_{t-1}>, which follows from the next token's:

    dg_t = dg_{t+1} + p sum W_t - <dw_t, variance_t> - <v_t, dv_t> - <beta_t, dbeta_t>

anew from the states themselves at the end of every chunk. What the tokens of a segment add to the gradient of the state at its
start can be summed forwards, weighted by exp(G_t) (`segment_gradients`): so segments run in parallel backwards too.

Decays are left out of the loops. With f the inverse of the decays since some token, M f and J f only grow by k (f v)^T and
k^2 (f beta)^T per token, o = (M f / (J f + f p))^T q, and the tile is multiplied by 1 / f once f is large. Backwards w is the
decay from a token to the end of its block: M w and J w lose k (w v)^T and k^2 (w beta)^T per token, and dM / w and dJ / w only
grow. So from the state at the end of a block the way back finds all others, and no state of a token reaches memory. The block
goes back as far as its decays leave enough of float32's precision. The state at its end is found by matrix products, from the
state at the start of the chunk (`put_state`).
"""
