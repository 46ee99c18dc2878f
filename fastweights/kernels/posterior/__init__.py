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

anew from the states themselves at the end of every chunk. No state of a token reaches memory: a chunk's tokens are replayed from
the state at its start, every second state goes into a workspace of the program, and the way back reads it and steps once more
where needed. What the tokens of a segment add to the gradient of the state at its start can be summed forwards, weighted by
exp(G_t) (`segment_gradients`): so segments run in parallel backwards too.
"""
