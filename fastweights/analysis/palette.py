"""The colours of mixers: a hue for every family, members that differ in lightness and hue.

The lightness (L* of CIELAB) of all colours lies on one ladder from 24 to 77 and is interleaved between the families, so that
members of a family are at least 5 apart, and a grey print tells most mixers apart by it; line style and marker tell the rest.
tests/analysis/test_plot_style.py measures the distances.
"""

from __future__ import annotations

__all__ = ["FAMILIES", "LINES", "MARKERS", "OTHERS"]

# Softmax attention is black in every plot.
FAMILIES: dict[str, dict[str, str]] = {
    "attention": {"softmax": "#000000", "vla-softmax": "#8C8C8C"},
    "linear attention": {
        "linear": "#03425C",
        "mamba2": "#01709A",
        "gla": "#1392C6",
        "pla": "#0673E7",
        "pgla": "#024C9D",
        "pmamba2": "#58C4FE",
        "vla-linear": "#81A2FE",
        "retnet": "#045EA3",
        "pmamba2-tied": "#130EA1",
        "pmamba2-key": "#769AC9",
    },
    "delta rule": {
        "deltanet": "#F51F60",
        "gdn": "#760329",
        "kda": "#C7004A",
        "pdn": "#773901",
        "pgdn": "#FEAB70",
        "pkda": "#DD6F04",
        "longhorn": "#B35802",
        "longhorn-elementwise": "#B30000",
        "vla-deltanet": "#FF8696",
    },
    "palimpsa": {"palimpsa-d": "#5339BD", "palimpsa-m": "#D868EF"},
    "regression": {"gka": "#2B4E00", "mesa": "#4F8900", "rls": "#7AC224", "vla": "#006D4F", "vla-conv": "#0EA67B"},
    "delta rule, other gains": {"comba": "#665828", "efla": "#A59445", "nlms": "#CFB138"},
    "several directions": {"deltaproduct": "#F22106", "gated-deltaproduct": "#7D1711", "rwkv7": "#9A0F89"},
    "directions": {"lattice": "#AE0279", "ttt": "#FE6EAC"},
}
# For mixers of users and variants of a mixer.
OTHERS = ("#034A42", "#096067", "#0B7A6F", "#13929C", "#05AF9E", "#06C7D5")

# Their numbers have no common divisor: no two of the first 68 styles share both, and no two of the first 17 a marker.
LINES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
# Three numbers are a star: how many points it has, 1, and its angle.
MARKERS = (
    "o",
    "s",
    "^",
    "D",
    "v",
    (4, 1, 0),
    (3, 1, 0),
    (3, 1, 180),
    "<",
    ">",
    "h",
    (4, 1, 45),
    "p",
    "X",
    "P",
    "d",
    "*",
)
