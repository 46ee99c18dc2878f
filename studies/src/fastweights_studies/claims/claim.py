"""What a claim is: its place in a paper, how it is measured here, and the rule that decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastweights.kinds import checked

from .conditions import Conditions
from .measurement import Measurement
from .verdict import Status, Verdict
from .words import Quantity, Words

__all__ = ["OWN", "PAPERS", "SOURCES", "Claim"]

PAPERS = {
    "pdn": "Preconditioned DeltaNet",
    "gka": "Gated KalmaNet",
    "palimpsa": "Palimpsa",
    "lattice": "Lattice",
    "vla": "Variational Linear Attention",
}
OWN = "own"
SOURCES = {**PAPERS, OWN: "A result of our own"}


@checked
@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, or a question of our own.

    Attributes:
        name: C1 to C35, or S1 to S6 for claims about speed; own-1 to own-3 for results of our own, own-2b for a part of
            own-2 with an expectation, a rule and a measurement of its own.
        paper: a key of `SOURCES`. source: the place in it, or what led to the question.
        says: the claim. printed: the paper's numbers.
        setting: what is computed here, with sizes.
        larger: what a GPU computes in another way where its size is larger. Results of the two sizes have a file each.
        expected: the status that was expected before anything was run. forecast: the numbers expected then, and why; "none", or
            "none: " and a reason, where no outcome was expected (`has_forecast`).
        rule: what decides, in words; `decide` computes it.
        measure: computes or reads the numbers. None where something is missing that `needs` names.
        numbers: what is measured, by the measure of a `Number`. Tables and pages name numbers by it.
        words: for the fields of numbers.
        decide: the verdict on the numbers.
        seeds: the default seeds.
        device: where it fits: "cpu", "cuda", or "files" for what the benchmarks have measured.
        cost: time on that device, in words.
        needs: what is missing where it cannot be measured yet.
        note: what a reader must know beside the outcome. It may be written after the run.
        to_decide: the setting that would decide the claim, where its authors could rightly say that this one cannot. The verdict
            is then `until_then`, and the outcome of the rule stands beside it (`verdict`).
        seen: which numbers had been seen before the claim or its rule had its present form, so that `expected` is no forecast of
            the outcome. Empty where it is one.
        safe: why the expectation risked nothing: its numbers had been "computed before", when the claims were listed, or the
            claim is an "identity", which only an error of ours can break. Empty where it risked something.
    """

    name: str
    paper: str
    source: str
    says: str
    printed: str
    setting: str
    expected: Status
    forecast: str
    rule: str
    measure: Callable[[Conditions], Measurement] | None
    decide: Callable[[Measurement], Verdict] | None
    numbers: Mapping[str, Quantity]
    words: Words = Words()  # noqa: RUF009
    seeds: tuple[int, ...] = (0,)
    device: Literal["cpu", "cuda", "files"] = "cpu"
    cost: str = "seconds"
    needs: str | None = None
    larger: str = ""
    note: str = ""
    to_decide: str = ""
    until_then: Status = "not resolved"
    seen: str = ""
    safe: Literal["", "computed before", "identity"] = ""
    declared: tuple[str, ...] = field(
        default=("paper", "source", "says", "printed", "setting", "expected", "forecast", "rule"),
        init=False,
        repr=False,
    )

    def verdict(self, found: Measurement) -> Verdict:
        """What the rule comes to, or that another setting must decide."""
        assert self.decide is not None
        by_rule = self.decide(found)
        if not self.to_decide or by_rule.status == self.until_then:
            return by_rule
        return Verdict(self.until_then, (*by_rule.statements, f"outcome of the rule: {by_rule.status}"))

    @property
    def has_forecast(self) -> bool:
        """Whether an outcome was expected. A forecast of "none", or of "none: " with a reason, is none."""
        return self.forecast.partition(":")[0] != "none"

    @property
    def changed_after_run(self) -> bool:
        """Whether the setting or the rule says that a part of it was added or changed after a run."""
        return re.search(r"after the (first |second )?runs?\b", f"{self.setting} {self.rule}") is not None

    @property
    def expectation(self) -> str:
        """The expected status with the numbers, or that none was forecast."""
        if not self.has_forecast:
            return self.forecast.replace("none", "no forecast", 1)
        return f"{self.expected}: {self.forecast}" + (
            f" (no forecast of this outcome: {self.seen})" if self.seen else ""
        )

    def result_name(self, device: str) -> str:
        """The name of the file of a result that a device has measured, without its ending."""
        return f"{self.name}-cuda" if self._is_larger(device) else self.name

    def declaration(self, device: str = "cpu") -> dict[str, Any]:
        """What was written before the run on a device, as a result repeats it."""
        return {name: getattr(self, name) for name in (*self.declared, *("larger",) * self._is_larger(device))}

    def _is_larger(self, device: str) -> bool:
        return bool(self.larger) and device.partition(":")[0] == "cuda"
