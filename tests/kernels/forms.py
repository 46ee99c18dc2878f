"""The forms in which layers launch the kernels that stand beside the memories: decoding, short convolution, norms, Palimpsa's
gates, SwiGLU, linear maps of a few rows, rows of pools, softmax attention of one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.ops.decoding import DECODING, call_decode, draw_states, in_float32

WHOLE_STATES = (
    "lattice-encode", "lattice-decode-decay", "output_normalized_ttt", "gated_kalmanet-chebyshev", "mesa",
    "recursive_least_squares-none", "variational_linear_attention-refresh",
)  # fmt: skip


def decoding() -> Iterator[Callable[[], object]]:
    """The kernels in bfloat16: decaying a channel, with a preconditioner and without, with a variance and without, for one token
    and several."""
    by_columns = (
        "linear_attention-channel", "delta_rule-channel-write", "preconditioned_delta_rule-channel", "dplr_delta_rule-channel",
        "palimpsa_posterior",
    )  # fmt: skip
    for name in (*by_columns, *WHOLE_STATES):
        # A whole state of 256 channels does not fit the registers, nor quite one of 128 for several tokens.
        for time, size in ((4, 64), (1, 128)) if name in WHOLE_STATES else ((1, 64), (4, 128), (1, 256)):
            inputs = DECODING[name].draw(batch=2, time=time, key=size, value=size, dtype=torch.bfloat16)
            states = tuple(in_float32(s) for s in draw_states(DECODING[name], inputs, 2))
            yield partial(call_decode, DECODING[name], inputs, states, None)
    yield from kept_states()
    yield from values_first()
    yield from key_energies()
    yield from elementwise_longhorn()


def kept_states() -> Iterator[Callable[[], object]]:
    """Six tokens with rows for the states after each."""
    for name in ("delta_rule-head-write", "preconditioned_delta_rule-channel", "palimpsa_posterior", *WHOLE_STATES):
        inputs = DECODING[name].draw(batch=2, time=6, key=64, value=64, dtype=torch.bfloat16)
        pool = tuple(in_float32(s) for s in draw_states(DECODING[name], inputs, 14))
        yield partial(call_decode, DECODING[name], inputs, pool, None, torch.arange(14).view(2, 7))


def values_first() -> Iterator[Callable[[], object]]:
    """One token of a delta rule whose states lie in a pool of vLLM, with a decay per head and per channel."""
    from fastweights.kernels.recurrent import RecurrentCall
    from fastweights.kernels.recurrent.delta_rule import decode

    x, gate, rows = torch.empty(2, 1, 4, 128, dtype=torch.bfloat16), torch.empty(2, 1, 4), torch.empty(2).int()
    for g in (gate, torch.empty(2, 1, 4, 128)):
        inputs = {**dict.fromkeys(("q", "k", "v"), x), "beta": gate, "g": g}
        yield partial(
            decode, RecurrentCall(inputs, {"S": torch.empty(9, 4, 128, 128).mT}, {"scale": 1.0}, None, None, rows)
        )


def elementwise_longhorn() -> Iterator[Callable[[], object]]:
    """One token of 64 and 256 channels, several of 128, all in a pool."""
    from fastweights.kernels.recurrent import RecurrentCall
    from fastweights.kernels.recurrent.elementwise_longhorn import decode

    for time, size in ((1, 64), (4, 128), (1, 256)):
        x, S, rows = (
            torch.empty(2, time, 4, size, dtype=torch.bfloat16),
            torch.empty(9, 4, size, size),
            torch.empty(2).int(),
        )
        yield partial(
            decode, RecurrentCall(dict.fromkeys(("q", "k", "v", "beta"), x), {"S": S}, {"scale": 1.0}, None, None, rows)
        )


def key_energies() -> Iterator[Callable[[], object]]:
    """Every kind of write key, and queries divided by the energy and a ridge: one number, or one per channel."""
    from fastweights.kernels.recurrent import RecurrentCall
    from fastweights.kernels.recurrent.key_energy import decode_keys, decode_queries

    k, gate, A = torch.empty(4, 1, 8, 128, dtype=torch.bfloat16), torch.empty(4, 1, 8), torch.empty(4, 8, 128)
    tokens = {"k": k, "g": gate, "beta": gate}
    rows = torch.empty(4, dtype=torch.int32)
    for ridge in (0.1, A[0]):
        yield partial(decode_queries, RecurrentCall({"q": k, **tokens, "ridge": ridge}, {"A": A}, {}, None, None, rows))
    for squash in ("softsign", "tanh", "none"):
        options = {"bound": 1.5, "eps": 1e-6, "squash": squash, "ridge": 0.1}
        yield partial(decode_keys, RecurrentCall({**tokens, "center": gate[0, 0]}, {"A": A}, options))


def convolution_of_rows() -> Iterator[Callable[[], object]]:
    """With keys of unit length, and without."""
    from fastweights.kernels.pointwise.short_convolution import backward, forward

    for head, dtype in ((64, torch.bfloat16), (None, torch.float32)):
        x = torch.empty(4, 2048, 1024, dtype=dtype)
        options = (torch.empty(1024, 4), None, None, None, True, head, 1e-6)
        yield partial(forward, x, *options, False)
        yield partial(backward, x, None, x, *options)


def convolution_of_slices() -> Iterator[Callable[[], object]]:
    """Keys, scaled to unit length, and values of heads in groups, with gradients that lie there too."""
    from fastweights.kernels.pointwise.short_convolution import backward, forward

    joint = torch.empty(2, 2048, 16, 768, dtype=torch.bfloat16)
    for first, width, head in ((128, 128, 128), (256, 256, None)):
        x, dy = joint[..., first : first + width], torch.empty(2, 2048, 16, width, dtype=torch.bfloat16)
        options = (torch.empty(16 * width, 4, dtype=torch.bfloat16), None, None, None, True, head, 1e-6)
        yield partial(forward, x, *options, False)
        yield partial(backward, dy, None, x, *options, x)


def convolution_of_packed_rows() -> Iterator[Callable[[], object]]:
    """With a bias, and windows before and after."""
    from fastweights.kernels.pointwise.short_convolution import backward, forward

    x, window = torch.empty(1, 8192, 1024, dtype=torch.bfloat16), torch.empty(8, 3, 1024, dtype=torch.bfloat16)
    options = (torch.empty(1024, 4), torch.empty(1024), window, torch.zeros(9).int(), True, 128, 1e-6)
    yield partial(forward, x, *options, True)
    yield partial(forward, x, *options, True, 256)  # queries, keys and values
    yield partial(backward, x, window, x, *options)


def gated_norm() -> Iterator[Callable[[], object]]:
    """Every kernel in the forms that layers launch."""
    from fastweights.kernels.pointwise.gated_norm import backward, forward

    forms = [
        (48, "silu", False, True),
        (64, "silu", False, False),
        (128, "silu", False, True),
        (128, "gelu", False, False),
        (2048, "silu", True, False),
        (4096, "silu", True, False),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for width, activation, first, skip in forms:
            x = torch.empty(8192, max(1, 1024 // width), width, dtype=dtype)
            skipped = (x, torch.empty(x.shape[1])) if skip else (None, None)
            options = (x, torch.empty(width), x, *skipped, activation, 1e-6, first)
            yield partial(forward, *options)
            yield partial(backward, x, *options)


def gated_writes() -> Iterator[Callable[[], object]]:
    """Values alone, with the gain of the importance, and without gradients also two tensors, one number per head and divisors."""
    from fastweights.kernels.pointwise.gated_writes import backward, forward

    for dtype in (torch.bfloat16, torch.float32):
        for width in (48, 192):
            v, s = torch.empty(4096, 16, width, dtype=dtype), torch.empty(4096, 16)
            yield partial(forward, v, s, None, None)
            yield partial(backward, v, None, v, s, None, None)
            yield partial(forward, v, s, v, s)
            yield partial(backward, v, v, v, s, v, s)
            yield partial(forward, v, s, v, None)
            yield partial(forward, v, s, v, None, torch.empty(16))
            yield partial(forward, v, s, None, None, None, 1e-4)


def delta_writes() -> Iterator[Callable[[], object]]:
    """Every form of a gain, and keys that are read, with queries and without."""
    from fastweights.kernels.pointwise.delta_writes import read_keys, write_gain

    k, gate, heads = torch.empty(8, 1, 4, 128, dtype=torch.bfloat16), torch.empty(8, 1, 8), torch.empty(8)
    for form in ("longhorn", "fading", "unit", "damped", "exact", "nlms"):
        yield partial(write_gain, gate, k, k, gate, form)
    yield partial(read_keys, k, k, gate, heads, heads[:4], 8, -10.0)
    yield partial(read_keys, k.float(), None, gate, None, None, 8, -10.0)


def positive_keys() -> Iterator[Callable[[], object]]:
    """With the directions of a penalty and without."""
    from fastweights.kernels.pointwise.positive_keys import positive_keys

    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 64)):
        k, w = torch.empty(8, 1, 4, width, dtype=dtype), torch.empty(4, width, width, dtype=dtype)
        yield partial(positive_keys, k, k, w, 1e-6)
        yield partial(positive_keys, k, k, None, 1e-6)


def rwkv7() -> Iterator[Callable[[], object]]:
    """A token with the one before and without."""
    from fastweights.kernels.pointwise.rwkv7 import erase_keys, read_answers, token_mix

    for dtype, width in ((torch.bfloat16, 64), (torch.float32, 128)):
        x, head = torch.empty(8, 1, 1024, dtype=dtype), torch.empty(1024 // width, width, dtype=dtype)
        k = x.unflatten(2, (-1, width))
        yield partial(token_mix, x, x, x[:6, 0], True, False)
        yield partial(token_mix, x, None, x[:6, 0], False, False)
        yield partial(erase_keys, k, k.float(), head, head, 1e-12)
        yield partial(read_answers, k, k, k, k, k, head, head, head, 1e-5)


def convolution_step() -> Iterator[Callable[[], object]]:
    """One token of a layer of transformers, whose filter sees as many inputs as are kept, and with a bias and fewer kept."""
    from fastweights.kernels.pointwise.convolution_step import step

    x = torch.empty(4, 8192, 1, dtype=torch.bfloat16)
    yield partial(step, x, x.new_empty(4, 8192, 4), x.new_empty(8192, 4), None, True)
    yield partial(step, x.float(), torch.empty(4, 8192, 2), torch.empty(8192, 3), torch.empty(8192), False)


def linear_rows() -> Iterator[Callable[[], object]]:
    """All kinds in bfloat16, of one sequence, of two or of 64, with the norms of blocks; a matrix in float32."""
    from fastweights.kernels.pointwise import Normed, Product
    from fastweights.kernels.pointwise.linear_rows import multiply_rows

    w, gate, of_channel = (torch.empty(width, 1024, dtype=torch.bfloat16) for width in (1024, 8, 1024))
    one, few, many = (torch.empty(rows, 1, 1024, dtype=torch.bfloat16) for rows in (1, 2, 64))
    gates = [Product(gate, "sigmoid", other=torch.empty(8)), Product(gate, "decay", torch.empty(8), torch.empty(8))]
    channels = Product(of_channel, "decay", torch.empty(1024), torch.empty(8))
    other_channels = Product(of_channel, "logsigmoid", torch.empty(1024), largest=0.0625)
    for x in (one, few, many):
        stream, heads = Normed(w[0], 1e-6, x), Normed(w[0, :128], 1e-6, gate=x, value=x, skip=torch.empty(8), width=128)
        yield partial(multiply_rows, x, [Product(w), Product(w), Product(w), *gates], Normed(w[0], 1e-6))
        yield partial(multiply_rows, x, [Product(w, "swiglu", more=w)], stream)
        yield partial(multiply_rows, x, [Product(w, "add", other=x)])
        yield partial(multiply_rows, x, [Product(w)], heads)
        yield partial(multiply_rows, x, [Product(w)], Normed(w[0], 1e-5, shift=w[1]))
        yield partial(multiply_rows, x, [channels])
        yield partial(multiply_rows, x, [other_channels])
        yield partial(multiply_rows, [x, x[..., :160]], [Product(w), Product(gate[:, :160], "tanh")])
    yield partial(multiply_rows, torch.empty(64, 300), [Product(torch.empty(40, 300))])


def residual_norm() -> Iterator[Callable[[], object]]:
    """A stream in float32 beside 16 bits, as under autocast, and all of one dtype; with a branch and without."""
    from fastweights.kernels.pointwise.residual_norm import backward, forward

    for stream in (torch.float32, torch.bfloat16):
        for width in (1024, 4096):
            x, w = torch.empty(4096, width, dtype=stream), torch.empty(width)
            b = x.bfloat16()
            for branch, ds in ((b, x), (None, None)):
                yield partial(forward, x, branch, w, 1e-6, 0.0, torch.bfloat16)
                yield partial(backward, ds, b, x, branch, w, 1e-6, 0.0)


def silu_product() -> Iterator[Callable[[], object]]:
    from fastweights.kernels.pointwise.silu_product import backward, forward

    for dtype in (torch.bfloat16, torch.float32):
        z = torch.empty(4096, 2816, dtype=dtype)
        yield partial(forward, z, z)
        yield partial(backward, z, z, z)


def channel_decay() -> Iterator[Callable[[], object]]:
    from fastweights.kernels.pointwise.channel_decay import backward, forward

    for dtype in (torch.bfloat16, torch.float32):
        f, vector = torch.empty(4096, 1024, dtype=dtype), torch.empty(1024)
        yield partial(forward, f, vector, vector)
        yield partial(backward, f.float(), f, vector, vector)


def layer_norm() -> Iterator[Callable[[], object]]:
    from fastweights.kernels.pointwise.layer_norm import layer_norm

    for dtype, width in ((torch.bfloat16, 1024), (torch.float32, 300)):
        x = torch.empty(8, 1, width, dtype=dtype)
        yield partial(layer_norm, x, x[0, 0], x[0, 0], 1e-5)


def l2_normalize() -> Iterator[Callable[[], object]]:
    from fastweights.kernels.pointwise.l2_normalize import l2_normalize

    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 48), (torch.float16, 4096)):
        yield partial(l2_normalize, torch.empty(4, 1, 8, width, dtype=dtype), 1e-6)


def step_decay() -> Iterator[Callable[[], object]]:
    """Steps that are a slice of a joint projection, with limits and without; parameters above a bound."""
    from fastweights.kernels.pointwise.step_decay import softplus_above, step_decay

    joint, per_head = torch.empty(4, 1, 4112, dtype=torch.bfloat16), torch.empty(16)
    yield partial(step_decay, joint[:, :, 4096:], per_head, per_head, 1e-3, 0.1)
    yield partial(step_decay, joint[:, :, 4096:], per_head.bfloat16(), per_head, 0.0, float("inf"))
    yield partial(step_decay, joint[:, :, 4096:], per_head, per_head, 0.0, float("inf"), joint[:, :, 4080:4096])
    yield partial(softplus_above, torch.empty(8, 128, dtype=torch.bfloat16), 0.25)


def token_convolution() -> Iterator[Callable[[], object]]:
    """Queries, keys and values of a layer, and one convolution with a bias; with windows in pools, and two that share one."""
    from fastweights.kernels.pointwise import TokenConvolution
    from fastweights.kernels.pointwise.token_convolution import convolve_token

    def part(channels: int, head: int | None, dtype: torch.dtype, bias: bool) -> TokenConvolution:
        x, window = torch.empty(4, 1, channels, dtype=dtype), torch.empty(4, 3, channels, dtype=dtype)
        return TokenConvolution(x, x.new_empty(channels, 4), x.new_empty(channels) if bias else None, window, head)

    parts = [part(1024, head, torch.bfloat16, False) for head in (128, 128, None)]
    yield partial(convolve_token, parts, True, 1e-6, True)
    yield partial(convolve_token, [part(2304, None, torch.float32, True)], True, 1e-6, False)
    rows = torch.empty(4, dtype=torch.int32)
    yield partial(convolve_token, parts, True, 1e-6, True, rows)
    drafted = [one._replace(x=torch.empty(4, 6, one.x.shape[2], dtype=one.x.dtype)) for one in parts]
    yield partial(convolve_token, drafted, True, 1e-6, True, torch.empty(4, 7, dtype=torch.int32))
    for given in (None, rows):
        yield partial(convolve_token, [parts[0], parts[0]], True, 1e-6, True, given)


def pool_rows() -> Iterator[Callable[[], object]]:
    """States in the layer's order and values first, windows in both orders, counts: read in float32 and written."""
    from fastweights.kernels.pointwise.pool_rows import copy_from_pool, copy_to_pool

    states, windows = torch.empty(9, 4, 128, 128, dtype=torch.bfloat16), torch.empty(9, 3, 1024, dtype=torch.bfloat16)
    rows = torch.empty(2, dtype=torch.int32)
    for pool in (states, states.mT, windows, windows.view(9, 1024, 3).mT, torch.empty(9, dtype=torch.int64)):
        dtype = torch.float32 if pool.is_floating_point() else pool.dtype
        yield partial(copy_from_pool, pool, rows, dtype)
        yield partial(copy_to_pool, pool, torch.empty(2, *pool.shape[1:], dtype=dtype), rows)


def ring_attention() -> Iterator[Callable[[], object]]:
    """Heads of their own and shared ones, with positions and padding and without."""
    from fastweights.kernels.attention.ring import attend

    counter = torch.zeros(4, dtype=torch.int64)
    for heads, width, dtype in ((8, 128, torch.bfloat16), (2, 64, torch.float32)):
        q, k = torch.empty(4, 1, 8, width, dtype=dtype), torch.empty(4, 1, heads, width, dtype=dtype)
        ring = torch.empty(4, 2176, heads, width, dtype=dtype)
        plain = heads == 8
        yield partial(
            attend, q, k, k, ring, ring, counter, counter, None if plain else counter, torch.empty(width // 2) if plain else None,
            True,
        )  # fmt: skip


def cross_entropy() -> Iterator[Callable[[], object]]:
    from fastweights.kernels.pointwise.cross_entropy import backward, both, forward

    for dtype in (torch.bfloat16, torch.float32):
        z, target, sums = torch.empty(1048, 32000, dtype=dtype), torch.zeros(1048, dtype=torch.int64), torch.empty(1048)
        yield partial(forward, z, target, -100)
        yield partial(backward, z, target, sums, sums[0], -100)
        yield partial(both, z, target, -100)
