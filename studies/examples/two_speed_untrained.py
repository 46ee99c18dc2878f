"""The rule of examples/own_rule/two_speed.py for the comparison without training."""

from fastweights_studies.leaderboard import register_rule

from fastweights.ops import OPS


@register_rule("two-speed", gates=("decay",), state=lambda d: 2 * d * d)
def without_training(x, gates):
    return OPS["two_speed_attention"](x.q, x.k, x.v, x.g, 0 * x.g, x.one / 2, scale=1.0)[0]
