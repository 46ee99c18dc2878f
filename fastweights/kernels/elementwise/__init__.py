r"""Elementwise Longhorn: a memory whose elements decay each by itself, and how the kernels differentiate it.

One head; L = |k|^2, and every sum over channels i is one over the keys, every sum over columns j one over the values:

    least = 1 / (1 + beta L)      e = beta least      others = L - k^2
    a_t = least + others e^T      S_t = a_t * S_{t-1} + k (e * v)^T      o_t = S_t^T q           (q scaled)

a = 1 - k^2 e^T, written without cancellation. There are two forms.

Float32: token after token (rule.py). A program holds a tile of S in registers, all channels by some columns, and steps
through the tokens of a sequence (`read_elements`).

Backwards (`element_gradients`), with dS the gradient of the state after a token:

    dS_t += q do^T                    dq = S_t do                     da = dS_t * S_{t-1}
    du = dS_t^T k                     dleast = da^T 1                 de = da^T others + v * du
    dL = sum_j (e dleast - e^2 de - e least dleast)                   (e dleast: what `others` takes L for)
    dk = dS_t (e * v) - 2 k * (da e) + 2 k dL
    dv = e * du                       dbeta = least^2 (de - L dleast)                dS_{t-1} = a_t * dS_t

A decay may be nearly 0, so the backward cannot divide it out. A launch of the forward without its outputs first recomputes the
states at the chunks' starts. Each program then takes the chunks from the last to the first: it recomputes a chunk's states,
stores the one before every token in its own scratch, and reads them from the last to the first.

16 bits: four tokens at a time, by matrix products (chunks.py, blocks.py; on Hopper GPUs, where a tile has as many columns as
channels, chunks_on_hopper.py). With x = -k^2 / L and y = e L a decay is 1 + x y^T, and the decay by a set of tokens a sum over
its subsets m. With X_m, Y_m the products of x_r and of y_r over r in m:

    prod_r (1 + x_r y_r^T) = sum_m X_m Y_m^T                                                         16 terms
    S_4 = (sum_m X_m Y_m^T) * S_0 + sum_s sum_{m of tokens after s} (k_s * X_m) (u_s * Y_m)^T,   u = e * v   15 terms
    o_t = sum_{m of tokens up to t} Y_m * ((q_t * X_m)^T S_0 + sum_s (q_t * X_m * k_s)^T 1 u_s),               30 terms
                                                                    the latter where all tokens of m come after s

Each sum is one product. Chunks of 64 tokens are independent but for their first state: `summarize_elements` finds by what a chunk
multiplies an element and what it adds, `join_elements` goes from chunk to chunk, and `read_chunk` reads.

Backwards, with D the gradient in the state after a block, <D, S_4> + sum_t <do_t, o_t> is linear in each of the vectors:

    dS_0 = (sum_m X_m Y_m^T) * D + sum_t sum_m (q_t * X_m) (do_t * Y_m)^T
    in q_t * X_m:  S_0 (do_t * Y_m) + sum_s k_s ((do_t * Y_m).u_s)
    in k_s * X_m:  D (u_s * Y_m)        in X_m:  (D * S_0) Y_m

and what a token reads also reaches k_s: (q_t * X_m) ((do_t * Y_m).u_s). The same holds with the sides exchanged. From there
dq, dk, dx and do, du, dy follow channel by channel (`differentiate_block`), and with x and y of one L, dL from e alone:

    de = L dy + v * du        dL = -e^2.de        dk += 2 k * (dL - dx / L)        dv = e * du        dbeta = least^2 * de
"""
