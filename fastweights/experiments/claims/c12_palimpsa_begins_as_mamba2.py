"""C12: Palimpsa-M without metaplasticity is Mamba-2. How near does the paper's own first value begin?"""

from __future__ import annotations

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from ...conversion import check_logits, convert
from ..claim import Claim, Measurement, Verdict, over_seeds
from ..draws import Draws

VOCABULARY, LENGTH = 256, 256


def measure(seed: int, device: str) -> dict[str, float]:
    draws = Draws(seed, device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        source = Mamba2ForCausalLM(
            Mamba2Config(
                vocab_size=VOCABULARY, hidden_size=64, num_heads=8, head_dim=16, state_size=16, num_hidden_layers=2, n_groups=1
            )
        )  # fmt: skip
    source.eval().to(device)
    tokens = draws.integers(VOCABULARY, 2, LENGTH)
    found = {}
    for b_scale in (0.1, -4.0):
        check = check_logits(source, convert(source, to="palimpsa-m", seed=seed, b_scale=b_scale), tokens)
        assert check.neutral is not None
        found["at b_scale -inf"] = check.neutral / check.largest_logit
        found[f"at b_scale {b_scale}"] = check.saved / check.largest_logit
    return found


def decide(found: Measurement) -> Verdict:
    neutral, first = found.largest("at b_scale -inf"), found.largest("at b_scale 0.1")
    reason = (
        f"difference over the largest logit {neutral:.1e} at b_scale -inf, {first:.1%} at 0.1, "
        f"{found.largest('at b_scale -4.0'):.1%} at -4"
    )
    if neutral >= 1e-5:
        return Verdict("does not hold", reason)
    return Verdict("holds" if first <= 0.1 else "holds weakly", reason)


CLAIM = Claim(
    name="C12",
    paper="palimpsa",
    source="section 2.4",
    says="At b_scale = -inf Palimpsa-M is Mamba-2; training can start arbitrarily near to a trained Mamba-2.",
    printed="equal; b_scale begins at 0.1 or above",
    setting=(
        "A Mamba-2 model of transformers with 2 layers of width 64 and random weights, converted; largest "
        "difference of the logits over 2 x 256 tokens, over the largest logit, float32."
    ),
    expected="holds weakly",
    forecast=(
        "equal to rounding at -inf; at 0.1 softplus is 0.744, the importance is not small, and logits differ by "
        "more than 10%"
    ),
    rule=(
        "holds if the logits differ by less than 1e-5 of the largest at b_scale -inf; weakly if they differ by "
        "more than 10% at 0.1, the lower end of the paper's own first values."
    ),
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
