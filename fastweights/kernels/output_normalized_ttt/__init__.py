r"""Output-normalised test-time training by chunks: the derivation.

One head. A token writes u = gamma h, where h depends on the memory's answer z alone:

    z_t = S_{t-1}^T k_t      r = 1 / |z|      p = (z.v) r^3      h = r v - p z      S_t = S_{t-1} + k_t u_t^T      o_t = S_t^T q_t

So once all u are known, this is linear attention with the values u, whose launches read the outputs. The u of a block of 16
tokens follow from its answers by the memory at the block's start S_0, one matrix product, and from vectors of V numbers:

    z_t = S_0^T k_t + sum_{j < t in the block} (k_j.k_t) u_j

`write_tokens` goes through the blocks of a sequence in order. Backward, with L the gradient in the state after token t, that of
its output included, du = L^T k and dh = gamma du:

    dz = -p dh + (3 p r^2 (z.dh) - r^3 (v.dh)) z - r^3 (z.dh) v      dv = r dh - r^3 (z.dh) z
    dgamma = h.du                                                    L <- L + k dz^T

The same recursion from the last token to the first, which `pass_gradients` goes through: du comes from L at the block's end, the
later dz of the block, and P^T dO of the chunk, as linear attention has it. With the dz known, the gradients of q and k are those
of the delta rule, whose launch computes them: -dz takes the place of its z.
"""
