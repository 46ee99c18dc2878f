r"""Elementwise Longhorn: a memory whose elements decay each by itself, and how the kernels differentiate it.

One head; L = |k|^2, and every sum over channels i is one over the keys, every sum over columns j one over the values:

    least = 1 / (1 + beta L)      e = beta least      others = L - k^2
    a_t = least + others e^T      S_t = a_t * S_{t-1} + k (e * v)^T      o_t = S_t^T q           (q scaled)

a = 1 - k^2 e^T, written without cancellation. The decay is no product of one number per row and one per column over several
tokens, so no matrix product reads a chunk. A program holds a tile of S in registers, all channels by some columns, and steps
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
"""
