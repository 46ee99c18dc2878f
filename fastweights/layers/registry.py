"""The sequence mixers by name: which layer, which options, what it computes and where it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checks import check_text, closest, error_prefix
from .delta_net import DeltaNet
from .gated_kalmanet import GatedKalmaNet
from .lattice import Lattice
from .linear_attention import LinearAttention
from .mesa import MesaNet
from .mixer import Mixer
from .palimpsa_d import PalimpsaD
from .palimpsa_m import PalimpsaM
from .rls import RecursiveLeastSquares
from .softmax_attention import SoftmaxAttention
from .ttt import TestTimeTraining
from .vla import VariationalLinearAttention

__all__ = ["MIXERS", "MixerSpec", "build_mixer", "check_mixer"]


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """One named mixer.

    Attributes:
        layer: the class that is built.
        options: its keyword arguments that make it this mixer; callers may add others or replace them.
        summary: one line for lists.
        equation: the memory's update, in plain text.
        source: paper and section.
        state: numbers a sequence holds in memory (H heads of K key and V value channels).
    """

    layer: type[Mixer]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    equation: str
    source: str
    state: str


MATRIX = "H K V"
MATRIX_AND_ENERGY = "H K (V + 1)"
MEAN_AND_IMPORTANCE = "2 H K V"
MATRIX_AND_GRAM = "H K (V + K)"
ENERGY = "A = exp(gP) A + betaP k^2"
KIMI_GATE = {"output_gate": "sigmoid", "gate_low_rank": True}
PDN = "Preconditioned DeltaNet"

MIXERS: dict[str, MixerSpec] = {
    "softmax": MixerSpec(
        layer=SoftmaxAttention,
        summary="causal softmax attention with rotary positions",
        equation="o_t = sum_s softmax_s(q_t.k_s / sqrt K) v_s",
        source="Vaswani et al. 2017; rotary positions: Su et al. 2021",
        state="2 T H K after T tokens",
    ),
    "linear": MixerSpec(
        layer=LinearAttention,
        summary="linear attention: adds every key-value pair",
        equation="S = S + k v^T",
        source="Katharopoulos et al. 2020, section 3",
        state=MATRIX,
    ),
    "mamba2": MixerSpec(
        layer=PalimpsaM,
        options={"metaplasticity": False},
        summary="Mamba-2: linear attention whose step size sets both decay and write",
        equation="S = exp(-A dt) S + k (dt v)^T, o = S^T q + D v",
        source="Dao and Gu 2024 (Mamba-2); Palimpsa, section 2.4",
        state=MATRIX,
    ),
    "gla": MixerSpec(
        layer=LinearAttention,
        options={"decay": "channel", "output_gate": "silu"},
        summary="gated linear attention: a decay a key channel",
        equation="S = Diag(a) S + k v^T",
        source="Yang et al. 2024 (GLA), section 4",
        state=MATRIX,
    ),
    "pla": MixerSpec(
        layer=LinearAttention,
        options={"preconditioner": "query"},
        summary="preconditioned linear attention: queries divided by the key channels' energy",
        equation=f"S = S + k v^T, {ENERGY}, q~ = q / (A + ridge)",
        source=f"{PDN}, sections 3.3 and 5, appendix F.2.2",
        state=MATRIX_AND_ENERGY,
    ),
    "pgla": MixerSpec(
        layer=LinearAttention,
        options={"decay": "channel", "preconditioner": "query", "output_gate": "silu"},
        summary="preconditioned gated linear attention",
        equation=f"S = Diag(a) S + k v^T, {ENERGY}, q~ = q / (A + ridge)",
        source=f"{PDN}, sections 3.4 and 5, appendix F.2.2",
        state=MATRIX_AND_ENERGY,
    ),
    "pmamba2": MixerSpec(
        layer=LinearAttention,
        options={"decay": "head", "gain": "beta", "preconditioner": "query"},
        summary="preconditioned Mamba-2 rule: a decay and a gain a head",
        equation=f"S = a S + beta k v^T, {ENERGY}, q~ = q / (A + ridge)",
        source=f"{PDN}, appendix E.3 and F.2.2",
        state=MATRIX_AND_ENERGY,
    ),
    "deltanet": MixerSpec(
        layer=DeltaNet,
        summary="delta rule: corrects what the memory answers to a key",
        equation="S = S + beta k (v - S^T k)^T",
        source="Schlag et al. 2021; Yang et al. 2024 (DeltaNet)",
        state=MATRIX,
    ),
    "gdn": MixerSpec(
        layer=DeltaNet,
        options={"decay": "head"},
        summary="gated DeltaNet: delta rule with a decay a head",
        equation="S' = a S, S = S' + beta k (v - S'^T k)^T",
        source="Yang et al. 2025 (Gated DeltaNet), section 3",
        state=MATRIX,
    ),
    "kda": MixerSpec(
        layer=DeltaNet,
        options={"decay": "channel", **KIMI_GATE},
        summary="Kimi delta attention: delta rule with a decay a key channel",
        equation="S' = Diag(a) S, S = S' + beta k (v - S'^T k)^T",
        source="Kimi Team 2025 (Kimi Linear), section 3",
        state=MATRIX,
    ),
    "pdn": MixerSpec(
        layer=DeltaNet,
        options={"preconditioner": "key"},
        summary="preconditioned DeltaNet: quiet key channels are written more strongly",
        equation=f"S = S + beta w (v - S^T k)^T, {ENERGY}, w = x^(-r/(1+|r|)) k, r = log A - c",
        source=f"{PDN}, section 3.5",
        state=MATRIX_AND_ENERGY,
    ),
    "pgdn": MixerSpec(
        layer=DeltaNet,
        options={"decay": "head", "preconditioner": "key"},
        summary="preconditioned gated DeltaNet",
        equation=f"S' = a S, S = S' + beta w (v - S'^T k)^T, {ENERGY}, w as in pdn",
        source=f"{PDN}, section 3.5",
        state=MATRIX_AND_ENERGY,
    ),
    "pkda": MixerSpec(
        layer=DeltaNet,
        options={"decay": "channel", "preconditioner": "key", **KIMI_GATE},
        summary="preconditioned Kimi delta attention",
        equation=f"S' = Diag(a) S, S = S' + beta w (v - S'^T k)^T, {ENERGY}, w as in pdn",
        source=f"{PDN}, section 3.5",
        state=MATRIX_AND_ENERGY,
    ),
    "longhorn": MixerSpec(
        layer=DeltaNet,
        options={"gain": "longhorn", "normalize_qk": False},
        summary="Longhorn: the delta rule's implicit step, stable for keys of any length",
        equation="S = S + beta/(1 + beta |k|^2) k (v - S^T k)^T",
        source="Liu et al. 2024 (Longhorn), section 3",
        state=MATRIX,
    ),
    "palimpsa-d": MixerSpec(
        layer=PalimpsaD,
        summary="Palimpsa on Gated DeltaNet's layout: what many keys have written to is rewritten slowly",
        equation="M = a M + k (s v)^T, J = a J + k^2 beta^T, o = (M / (J + p))^T q + D v",
        source="Palimpsa, sections 2.3 and 2.4, appendix A.1",
        state=MEAN_AND_IMPORTANCE,
    ),
    "palimpsa-m": MixerSpec(
        layer=PalimpsaM,
        summary="Palimpsa on Mamba-2's block: what many keys have written to is rewritten slowly",
        equation="M = a M + k (dt v)^T, J = a J + k^2 beta^T, o = (M / (J + p))^T q + D v",
        source="Palimpsa, sections 2.3 and 2.4, appendix A.1",
        state=MEAN_AND_IMPORTANCE,
    ),
    "gka": MixerSpec(
        layer=GatedKalmaNet,
        summary="Gated KalmaNet: ridge regression on the whole fading past, solved anew for every query",
        equation="H = a H + k k^T, U = a U + k v^T, o = U^T (m (H + ridge |H| I)^-1 q + (1 - m) q)",
        source="Gated KalmaNet, section 4",
        state=MATRIX_AND_GRAM,
    ),
    "mesa": MixerSpec(
        layer=MesaNet,
        summary="MesaNet: ridge regression on the fading past with a learned ridge a key channel",
        equation="H = a H + beta k k^T, U = a U + beta k v^T, o = U^T (H + Diag(ridge))^-1 q",
        source="von Oswald et al. 2025 (MesaNet); Gated KalmaNet, section 3.2",
        state=MATRIX_AND_GRAM,
    ),
    "lattice": MixerSpec(
        layer=Lattice,
        summary="Lattice: unit slots that take in only what is orthogonal to what they hold",
        equation="s_i = unit(d s_i - gamma k_i (I - s_i s_i^T) (S^T k - v))",
        source="Karami and Mirrokni 2025 (Lattice), sections 3 and 5",
        state=MATRIX,
    ),
    "ttt": MixerSpec(
        layer=TestTimeTraining,
        summary="test-time training with normalised answers, Lattice's baseline",
        equation="z = S^T k, S = S - gamma k ((I - z z^T / |z|^2) (z / |z| - v) / |z|)^T",
        source="Sun et al. 2024 (TTT); Karami and Mirrokni 2025, eq. 19",
        state=MATRIX,
    ),
    "vla": MixerSpec(
        layer=VariationalLinearAttention,
        summary="variational linear attention: writes along directions that a penalty bends",
        equation="A = (A^-1 + u u^T)^-1, S = S + unit(A k) (v - S^T k)^T, o = S^T q / (z.q)",
        source="Variational Linear Attention, section 3, Algorithm 1",
        state="H K (V + K + 1)",
    ),
    "rls": MixerSpec(
        layer=RecursiveLeastSquares,
        summary="recursive least squares: the exact regression of all values on all keys so far",
        equation="P = (a P^-1 + beta k k^T)^-1, S = S + beta P k (v - S^T k)^T",
        source="Preconditioned DeltaNet, Theorem 3.1; Kalman 1960",
        state=MATRIX_AND_GRAM,
    ),
}


def check_mixer(name: str, options: Mapping[str, Any]) -> MixerSpec:
    """The mixer called `name`, once that and the names of the options are known to exist.

    Raises:
        ValueError: an unknown mixer or option; the message names the nearest and all valid ones.
        TypeError: a name that is no string.
    """
    check_text("mixer", name, what="the name of a mixer")
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}{closest(name, MIXERS)}; choose from {', '.join(MIXERS)}")
    spec = MIXERS[name]
    valid = [key for key in inspect.signature(spec.layer).parameters if key not in ("hidden_size", "num_heads")]
    for key in options:
        if key not in valid:
            raise ValueError(f"mixer {name!r} has no option {key!r}{closest(key, valid)}; it has {', '.join(valid)}")
    return spec


def build_mixer(name: str, *, hidden_size: int, num_heads: int, layer_idx: int = 0, **options: Any) -> Mixer:
    """The layer called `name`, with the options of `MIXERS[name]` and, over them, those given.

    layer_idx says in an error message which layer of a model the options were meant for.

    Raises:
        ValueError: an unknown name or option, or a value that does not fit.
        TypeError: an option of a wrong kind.
    """
    with error_prefix(f"layer {layer_idx}"):
        spec = check_mixer(name, options)
        return spec.layer(hidden_size=hidden_size, num_heads=num_heads, **{**spec.options, **options})
