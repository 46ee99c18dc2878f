r"""Output-normalised test-time training by chunks: the derivation.

One head. A token writes u = gamma h, where h depends on the memory's answer z alone:

    z_t = S_{t-1}^T k_t      r = 1 / |z|      p = (z.v) r^3      h = r v - p z      S_t = S_{t-1} + k_t u_t^T      o_t = S_t^T q_t

So once all u are known, this is linear attention with the values u, whose launches read the outputs. The u of a block of 16
tokens follow from its answers by the memory at the block's start S_0, one matrix product, and from vectors of V numbers:

    z_t = S_0^T k_t + sum_{j < t in the block} (k_j.k_t) u_j

A launch goes through the blocks of a sequence in order. In float32 it is `write_tokens`, which sums |z|^2 and z.v over channels.
In 16 bits it is `write_by_products`, which reads the two off the inner products of all answers z and values v of the block. These
begin as matrix products with S_0^T k_t. Once token t has written, every later answer z_s of the block gains c_s u_t, where
c_s = k_t.k_s, so

    x.u_t = gamma r (x.v_t) - gamma p (x.z_t)                          for every z and v in the place of x
    z_s.x += c_s (x.u_t) + c_x (z_s.u_t + c_s |u_t|^2)                 c_x = 0 where x is a value

u_t lies across z_t, so |u_t|^2 is gamma r (v_t.u_t). Every warp has these inner products in its lanes and registers, and a thread
one channel of all answers. Where answers are short, z_s.x loses half of its digits, which float32 needs.

Backward, with L the gradient in the state after token t, that of its output included, du = L^T k and dh = gamma du:

    dz = -p dh + (3 p r^2 (z.dh) - r^3 (v.dh)) z - r^3 (z.dh) v      dv = r dh - r^3 (z.dh) z
    dgamma = h.du                                                    L <- L + k dz^T

Backward nothing has to go token by token: z, r and p are known, so dz is linear in du. With the tokens of a block as rows, A the
products k_j.k_t for t > j, D what du has from later blocks and P^T dO of the chunk, and a = z.du, b = v.du of every token:

    x = gamma (3 p r^2 a - r^3 b)      y = gamma r^3 a      dz = x z - y v - gamma p du      du = D + A dz
    du = M D + N (diag(x) Z - diag(y) V),          M = (I + A diag(gamma p))^-1,      N = M A
    (I - L) [a, b] = [Z.(M D), V.(M D)],           L from N * Z Z^T, N * Z V^T and N * V V^T by the formulas of x and y

`block_systems` finds M, N and (I - L)^-1 of all blocks in parallel. A and L are strictly triangular in tokens, so A's 16th
power is 0 and inverses are products: M = (I + B)(I + B^2)(I + B^4)(I + B^8) with B = -A diag(gamma p). That of I - L goes
by halves of 8 tokens, whose 8th powers are 0. `pass_gradients`, on Hopper GPUs in 16 bits `token_gradients_in_turn`, then
goes through the blocks from the last with a few products for each. With the dz known, the gradients of q and k are those of
the delta rule, whose launch computes them: -dz takes the place of its z."""
