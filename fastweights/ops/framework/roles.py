"""The roles that inputs of the ops have, and the forms that a decay takes."""

from __future__ import annotations

from dataclasses import replace

from .spec import Parameter, Role, Scale


def optional(role: Role) -> Role:
    return replace(role, optional=True)


QUERY = Role(kind="query", dims=("HK",), dtype="inputs", reaches="token", scaled=True)
POSITIVE_QUERY = replace(QUERY, kind="positive query")  # after a feature map
KEY = Role(kind="key", dims=("HK",), dtype="inputs")
ERASURE = replace(KEY, kind="erasure")
POSITIVE_KEY = replace(KEY, kind="positive key")
WRITE_KEY = Role(kind="write key", dims=("GK", "HK"), dtype="inputs")
PENALTY = replace(WRITE_KEY, kind="penalty")
VALUE = Role(kind="value", dims=("GV",), dtype="inputs", reaches="column")
# Several steps per token.
STEP_KEY = replace(KEY, dims=("HRK",))
STEP_WRITE_KEY = replace(WRITE_KEY, dims=("GRK", "HRK"))
STEP_VALUE = replace(VALUE, dims=("GRV",))
JOINT_VALUE = replace(VALUE, kind="joint value", reaches="head")  # the rule reads the whole vector at once

GAIN = Role(kind="gate", dims=("G", "H"))
POSITIVE_GAIN = replace(GAIN, low=0.0, must_be="at least 0", remedy="sigmoid(...)")
STEP_GAIN = replace(GAIN, dims=("GR", "HR"))
# One per value channel.
VALUE_GAIN = replace(
    POSITIVE_GAIN, kind="value gate", dims=("GV", "HV"), remedy="sigmoid(...) or softplus(...)", reaches="column"
)
TOKEN_GAIN = replace(GAIN, reaches="token")  # of the output alone
KEPT = replace(GAIN, kind="kept", low=0.0, high=1.0, must_be="between 0 and 1", remedy="sigmoid(...)")
LOG_DECAY = replace(
    GAIN, kind="decay", high=0.0, minus_inf=True, must_be="a log decay, at most 0",
    remedy="-exp(...) or logsigmoid(...)",
)  # fmt: skip
SLOW_LOG_DECAY = replace(LOG_DECAY, kind="slow decay")  # for rules that forget their prior as well
CHANNEL_LOG_DECAY = replace(LOG_DECAY, dims=("G", "H", "GK", "HK"))  # one per head, or one per key channel

CENTER = Parameter(kind="center", dims=("H", "G"))
PRIOR = Parameter(
    kind="prior", dims=("H", "G"), above=0.0, finite=True, must_be="positive and finite", remedy="softplus(...)"
)
CHANNEL_RIDGE = Parameter(
    kind="ridge", dims=("H", "G", "HK", "GK"), above=0.0, must_be="positive", remedy="softplus(...)"
)

SCALE = Scale()

# For the cases of an op: no decay, one per head, one per key channel.
DECAY_FORMS: dict[str, dict[str, str]] = {"none": {}, "head": {"g": "G"}, "channel": {"g": "GK"}}
