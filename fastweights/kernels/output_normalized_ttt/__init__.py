r"""Output-normalised test-time training by chunks: the derivation.

One head. A token writes u = gamma h, where h depends on the memory's answer z alone:

    z_t = S_{t-1}^T k_t      r = 1 / |z|      p = (z.v) r^3      h = r v - p z      S_t = S_{t-1} + k_t u_t^T      o_t = S_t^T q_t

So once all u are known, this is linear attention with the values u, whose launches read the outputs. The u of a block of 16
tokens follow from its answers by the memory at the block's start S_0, one matrix product, and from vectors of V numbers:

    z_t = S_0^T k_t + sum_{j < t in the block} (k_j.k_t) u_j

`write_tokens` goes through the blocks of a sequence in order. What follows token by token are two numbers, |z|^2 and z.v. In 16
bits they are read off the inner products of all answers z and values v of the block, which begin as matrix products with S_0^T
k_t. Once token t has written, every later answer of the block gains c_s u_t, c_s = k_t.k_s, so

    x.u_t = gamma r (x.v_t) - gamma p (x.z_t)                          for every z and v in the place of x
    z_s.x += c_s (x.u_t) + c_x (z_s.u_t + c_s |u_t|^2)                 c_x = 0 where x is a value

A warp has these inner products in its lanes and registers, and a thread one channel of all answers, so no sum over channels is
left in the loop. In float32 |z|^2 and z.v are sums over channels: where answers are short, z_s.x loses half of its digits.

Backward, with L the gradient in the state after token t, that of its output included, du = L^T k and dh = gamma du:

    dz = -p dh + (3 p r^2 (z.dh) - r^3 (v.dh)) z - r^3 (z.dh) v      dv = r dh - r^3 (z.dh) z
    dgamma = h.du                                                    L <- L + k dz^T

Backward z, r and p are known, so dz is linear in du, and of its channels a token needs a = z.du and b = v.du alone:

    x = gamma (3 p r^2 a - r^3 b)      y = gamma r^3 a      dz = x z - y v - gamma p du
    du_j = D_j + sum_{t > j in the block} (k_j.k_t) dz_t

with D what du has from later blocks and P^T dO of the chunk. `answer_products` finds the inner products of all z and v of every
block in parallel. `pass_gradients` goes through the blocks from the last. It begins with the inner products of every z and v
with D, one matrix product. Token t then adds (k_j.k_t) dz_t to the earlier du_j, and so to their inner products. With the dz
known, the gradients of q and k are those of the delta rule, whose launch computes them: -dz takes the place of its z.
"""
