r"""Ridge regression at every token, solved chunk by chunk: the derivation.

One head, one chunk of 64 tokens. H is the Gram matrix at the chunk's start, z_c the decay from there to token c, M_cj the
decay from token j to token c (0 for j > c), b_j the gain. Rows are tokens:

    H_c = z_c H + sum_j M_cj b_j k_j k_j^T            (H_c + lam_c) x_c = q_c            y_c = m_c x_c + (1 - m_c) q_c

No H_c is formed. The products of all tokens with their matrices are X -> z (X H) + (M b (X K^T)) K: three matrix products, in
which X, K and H stay on the chip through all iterations. The Frobenius norms follow from products as well,

    |H_c|^2 = z_c^2 |H|^2 + 2 z_c sum_j M_cj b_j k_j^T H k_j + sum_jl M_cj b_j (k_j.k_l)^2 b_l M_cl

The answers o_c = U_c^T y_c are linear attention with the queries y, the keys b k and the values v, whose launches compute them
and their gradients. H at the chunks' starts comes from the chunks' sums, all in parallel, and a scan over chunks, number by
number.

In 16 bits the system is solved in units of its own: keys of about length 1 (divided by a power of two, which rounds nothing), H
of norm 1, every token's row divided by |H_c|, right-hand sides such that the solution has at most about length 1. So operands are
float16 whatever the inputs' range, with an eighth of bfloat16's rounding. Sums, iterates and residuals are float32. x and y leave
as sums of two numbers: where few keys have been, they are longest in the directions that no key has, by up to 1 / ridge, and an
error of 2^-9 of that would count in the others, which alone the memory answers.

Backward, by implicit differentiation: e_c = (H_c + lam_c)^-1 dx_c by the same solver. Then the gradient in H_c alone is

    D_c = -(e_c x_c^T + x_c e_c^T + w_c H_c) / 2          w_c = 2 ridge (e_c.x_c) / |H_c|, 0 where lam does not follow |H_c|

and with L the gradient of H at the chunk's end, all of it symmetric, Z_i the decay from token i to that end:

    L <- z_last L + sum_c z_c D_c                              (a scan again)
    dk_i = b_i n_i        db_i = k_i.n_i / 2                   of the systems, with
    n_i  = 2 Z_i L k_i - sum_c M_ci (e_c (x_c.k_i) + x_c (e_c.k_i) + w_c H_c k_i)
    dG_c = <D_c, H_c> - b_c k_c.n_c / 2, and at the last token z_last <L, H> + sum_j Z_j b_j k_j^T L k_j
    sum_c M_ci w_c H_c k_i = (sum_c M_ci w_c z_c) H k_i + sum_j (M^T Diag(w) M)_ij b_j (k_j.k_i) k_j

G is the sum of the log decays from the chunk's start. The ridge per channel has the gradient -sum_c e_c x_c.
"""
