"""C34: Lattice's objectives beside each other, and their gain over GDN by context."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from ..claim import Claim, Measurement, Verdict, clear_sign, lost_trainings, not_finite, paired
from ..trained import language_models, small_model

CONTEXTS = (256, 1024, 4096)
MIXERS = {
    "gdn": {"name": "gdn", "output_gate": "gelu"},
    **{objective: {"name": "lattice", "objective": objective} for objective in ("decode", "encode", "similarity")},
}


def decide(found: Measurement) -> Verdict:
    lost = lost_trainings(found, MIXERS)
    if lost:
        return not_finite(lost)
    objectives = [found.mean(name) for name in ("decode", "encode", "similarity")]
    spread = math.expm1(max(objectives) - min(objectives))
    gains = [
        [x - y for x, y in zip(found.values[f"gdn, context {n}"], found.values[f"decode, context {n}"])]
        for n in CONTEXTS
    ]
    signs = [clear_sign(*paired(longer, shorter), errors=1) for shorter, longer in pairwise(gains)]
    equal, rising = spread <= 0.005, min(signs) > 0 and statistics.fmean(gains[-1]) > 0
    shown = ", ".join(f"{math.expm1(statistics.fmean(gain)):.1%} at {n}" for gain, n in zip(gains, CONTEXTS))
    reason = f"objectives within {spread:.2%} in perplexity; gain over GDN {shown}"
    if equal and rising:
        return Verdict("holds", reason)
    if rising or (equal and min(signs) != 0):
        return Verdict("holds weakly", reason)
    return Verdict("not resolved" if equal else "does not hold", reason)


CLAIM = Claim(
    name="C34",
    paper="lattice",
    source="table 2",
    says="The three objectives are equally good, and the gain over GDN grows with the context.",
    printed="within .5% perplexity; gain on Books 3.5% at 512, 4.5% at 8k",
    setting=(
        "4 layers of width 256, 4 heads of 64, rows of 4096 tokens, 16M tokens of the source text of PyTorch, none read "
        "twice; perplexity at contexts of 256, 1024 and 4096."
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds if the objectives are within .5% and the gain over GDN rises from context to context by more than "
        "a standard error of the difference and ends above zero; weakly if only one of the two is so; not resolved if the "
        "objectives are equal and the gain neither rises nor falls so far. (The end above zero was added after the run, in which "
        "GDN is better at every context.)"
    ),
    measure=language_models("C34", MIXERS, **small_model(layers=4, width=256, length=4096, context_lengths=CONTEXTS)),
    decide=decide,
    seeds=(1, 2, 3),
    device="cuda",
    cost="5 minutes of one GPU",
)
