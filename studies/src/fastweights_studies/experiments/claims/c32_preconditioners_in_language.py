"""C32: the order of preconditioners in a language model."""

from __future__ import annotations

from ..claim import Claim, Measurement, Verdict, clear_sign, lost_trainings, not_finite, paired
from ..trained import language_models, small_model

MIXERS = {
    "PGDN": "pgdn",
    "tied": {"name": "pgdn", "tie_preconditioner": True},
    "GDN": "gdn",
    "unstable": {"name": "pgdn", "squash": "none"},
    "P-Mamba-2": "pmamba2",
    "GDN[-1,1]": {"name": "gdn", "negative_eigenvalues": True},
}
ORDER = ("PGDN", "tied", "GDN", "unstable", "P-Mamba-2")
NEAR = 0.03  # nats between GDN[-1,1] and GDN, where the printed number would be a misprint


def decide(found: Measurement) -> Verdict:
    lost = lost_trainings(found, MIXERS)
    if set(lost) & set(ORDER):
        return not_finite(lost)
    rows, signs = [], []
    for better, worse in zip(ORDER, ORDER[1:]):
        mean, error = paired(found.values[worse], found.values[better])
        signs.append(clear_sign(mean, error))
        rows.append(f"{worse} - {better} {mean:+.4f} +- {error:.4f}")
    negative, error = paired(found.values["GDN[-1,1]"], found.values["GDN"])
    within = "within" if abs(negative) <= NEAR else "not within"
    clear = f"{sum(sign > 0 for sign in signs)} of {len(signs)} are clear"
    reason = "; ".join([*rows, clear, f"GDN[-1,1] - GDN {negative:+.4f} +- {error:.4f}, {within} {NEAR} as forecast"])
    if any(sign < 0 for sign in signs):
        return Verdict("does not hold", reason)
    return Verdict("holds" if all(signs) else "holds weakly" if any(signs) else "not resolved", reason)


CLAIM = Claim(
    name="C32",
    paper="pdn",
    source="table 6",
    says="PGDN has a lower loss than with a tied preconditioner, than GDN, than the unstable form, than P-Mamba-2.",
    printed="2.511, 2.518, 2.528, 2.536, 2.543 (GDN[-1,1] 5.520), 340M, 15B tokens",
    setting=(
        "6 layers of width 512, 4 heads of 128, 16M tokens of the source text of PyTorch, none read twice, paired by "
        "seed. The normalisations of table 7 (2.511 to 2.524) are not trained."
    ),
    expected="not resolved",
    forecast="differences of .005 to .03 nats; GDN[-1,1] within .03 of GDN, so that 5.520 is a misprint",
    rule=(
        "holds if all four paired differences have the paper's sign beyond two standard errors; weakly if some do "
        "and none the other sign, beyond two standard errors too (these words were added after the run; the code had "
        "them before)."
    ),
    measure=language_models("C32", MIXERS, **small_model()),
    decide=decide,
    seeds=(1, 2, 3),
    device="cuda",
    cost="10 minutes of one GPU",
)
