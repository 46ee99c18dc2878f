r"""The inverse of a growing Gram matrix at every token: the derivation that the kernels of this folder share.

One head. A = G^-1, where G gains c u u^T per token (c the gain), and y_t = A_t b_t. With A at a chunk's start and rows as tokens,
r_t = A_{t-1} u_t follows from Sherman and Morrison's formula, t times over:

    r_t = A u_t - sum_{j < t} w_j r_j (r_j.u_t)      d_t = 1 + c_t r_t.u_t      w_t = c_t / d_t
    Y = B A - tril(B R^T) diag(w) R                  y_t = r_t / d_t where b_t = u_t

A sequence is cut into segments of a few chunks. `segment_sums` and `scan_sums` find G at every segment's start, a sum that is
added up in float64, and `invert_sums` inverts all of them in parallel. `solve_segment` then takes the chunks of a segment one
after the other, with A - R^T diag(w) R for the next. No inverse is carried further, so errors do not grow with the number of
tokens.

`eliminate` sweeps blocks of 16 channels. With P = L L^T the pivot block of M and R its rows, where the pivot's own columns
are replaced by -I, and N = L^-1 R, one product takes a block to its place in -M^-1:

    M <- (M without the block's rows and columns) - N^T N

The factor of 16 rows is found by `eliminate_rows`, within a warp, for the channels as for the tokens of a chunk.

Backwards, with x_t = A_t dy_t, which is Y with dY in the place of B:

    dA_t = dy_t b_t^T     dG_t = -(x_t y_t^T + y_t x_t^T) / 2     db_t = x_t     du_t = 2 c_t D_t u_t     dc_t = u_t^T D_t u_t

Without b the output is c_t y_t: then c_t dy_t takes the place of dy_t, and dc_t gains y_t.dy_t.

D_t = sum_{s >= t} dG_s, so -2 D_t u_t = sum_{s >= t} x_s (y_s.u_t) + y_s (x_s.u_t): two linear attentions, from the last token to
the first, whose one state is H = -2 D. `solve_tokens` finds x, `segment_sums` what a segment adds to H, `scan_sums` H at the
segments' ends, and `segment_gradients` goes through a segment from its last chunk to the first. No inverse is differentiated.

**What tokens add to A.** With a refresh A_t = (A_{t-1}^-1 + u u^T)^-1 + rho_t I, and G is no sum. A is then the covariance of a
vector that is observed through every u with noise 1 and takes a random step of variance rho after some observations. So a
chunk of any tokens has the same form: with n_t what was added before token t since the chunk's start, and m_t = n_t + rho_t,

    W_t = (A + n_t I) u_t      S_ts = S_st = W_t.u_s for t <= s      I + S = L L^T      Z = L^-1 W
    A_t b = (A + m_t I) b - sum_{j <= t} z_j (z_j.b)

`carry_inverse` passes A through a sequence chunk by chunk, with the symmetric (I + S)^-1 in the place of its factor: A - W^T (I +
S)^-1 W.

Backwards, with Y_t = A_t b_t, Q = tril(B Z^T), Q' = tril(dY Z^T), F the adjoint of A at the chunk's end, and H(X) the lower
triangle of X with half of its diagonal:

    dZ = -Q^T dY - Q'^T B - Z (F + F^T)      X = L^-T (H(dZ Z^T) + H(dZ Z^T)^T) L^-1      C = -H(X)^T
    dW = L^-T dZ + C U      dU = (dW + C^T U) A + n (dW) + C^T (n U)

dW is linear in F. So the adjoint at a chunk's start is E^T F E + N with E = I - Z^T L^-1 U, and N = dY^T B + dW^T U for F =
0; of F the symmetric part alone counts. `chunk_adjoint` finds E and N of all chunks, `carry_adjoint` passes F through a
sequence, and both are used once more for dU.

`penalized_rule.py` launches what variational linear attention does with the results: the chunk kernels' delta rule along A_t
k_t of length 1, and the division of its answers.
"""
