"""The parts around a memory, written out again from the layers' own weights for x [T, D] of one sequence."""

import torch


def silu(x):
    return x / (1 + torch.exp(-x))


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def filtered(y, convolution):
    """y [T, channels] through a causal convolution with zeros in front."""
    filters = convolution.weight
    width = filters.shape[1]
    padded = torch.cat([y.new_zeros(width - 1, y.shape[1]), y])
    return torch.stack([(padded[t : t + width].T * filters).sum(1) for t in range(len(y))])


def convolved(layer, name, x):
    """SiLU of the causal convolution of one projection, for x [T, D] of one sequence."""
    shared = layer.options.shared_qk
    y = x @ layer.qkv.get_submodule("qk_proj" if shared and name != "v" else f"{name}_proj").weight.T
    if shared and name == "v":
        return y
    if shared or layer.qkv.has_convolution:
        y = filtered(y, layer.qkv.get_submodule(f"{name}_conv"))
    return silu(y) if layer.qkv.activation == "silu" else y


def head_decay(gate, x):
    return -gate.A_log.exp() * torch.log(1 + torch.exp(x @ gate.a_proj.weight.T + gate.dt_bias))


def projected(layer, x):
    """q, k [T, H, channels] and v [T, G, channels] of a layer."""
    widths = {"q": layer.heads.key, "k": layer.heads.key, "v": layer.heads.value}
    return tuple(convolved(layer, name, x).unflatten(1, (-1, widths[name])) for name in "qkv")


def heads(layer, x):
    """q, k and v [T, G, channels], those of q and k repeated for the value heads."""
    q, k, v = projected(layer, x)
    repeat = v.shape[1] // q.shape[1]
    return q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1), v


def decay(layer, x):
    """exp(g) [T, G] of a layer with one decay per head, or none."""
    heads = layer.heads.value_heads
    return x.new_ones(len(x), heads) if layer.decay is None else head_decay(layer.decay, x).exp()


def gate(gain, x):
    """Sigmoid of a projection [T, G], 1 where there is none."""
    if gain is None:
        return 1.0
    bias = gain.b_proj.bias
    return torch.sigmoid(x @ gain.b_proj.weight.T + (0 if bias is None else bias))


def metaplastic_share(layer, a):
    """How much of its importance a head keeps [T, G], for decays a [T, G]."""
    if layer.threshold is None:
        return torch.ones_like(a)
    log_window = torch.log(1 / (1 - a))
    mean = torch.stack([log_window[: t + 1].mean(0) for t in range(len(a))])
    above = mean - layer.threshold.threshold
    return torch.where(above > 0, torch.tanh(above), 0)


def shift_of_variance(layer, q, J, prior):
    """What the variance of an answer adds to the projection of the gate: q [K], J [K, V] -> [V], per unit of c."""
    return torch.log(q**2 @ (1 / (J + prior)) / (q @ q / prior))


def answer(output, o, x, shift=0):
    """The layer's output [T, D] for what its heads read, o [T, G, V]."""
    if output.norm is not None:
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * output.norm.weight
    y = o.flatten(1)
    if output.gate is not None:
        z = output.g_proj(x) + shift
        normal = torch.erf(z / 2**0.5) / 2 + 0.5
        y = y * {"silu": silu(z), "sigmoid": torch.sigmoid(z), "gelu": z * normal}[output.gate]
    return y @ output.o_proj.weight.T
