"""The ops that are judged: fresh random inputs, our call, and what the computation costs at least.

Sizes: B batch, T time, H heads, K key channels, V value channels, HV value heads. Costs are those of docs/rules.md
(multiply-adds a token and head of the chunkwise form, chunks of 64), the backward counted as twice the forward. Where a rule
takes elementwise steps that no matrix product does, it costs float32 operations per element of the state and token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import ops

from .timing import Ceilings


class Sizes(NamedTuple):
    """HV is H where it is not given."""

    B: int
    T: int
    H: int
    K: int
    V: int
    HV: int = 0

    @classmethod
    def read(cls, text: str) -> Sizes:
        return cls(*map(int, text.split(",")))

    @property
    def heads(self) -> int:
        return self.HV or self.H

    def __str__(self) -> str:
        return ",".join(map(str, self if self.HV else self[:5]))


@dataclass(frozen=True)
class Case:
    """One op in one form. inputs: kind of every tensor by argument name; states: shape of every state after [N, heads];
    constants: other arguments; macs: multiply-adds a token and head, None where it does without products; elementwise: float32
    operations of a forward per element and token."""

    op: Callable[..., tuple[Tensor, Any]]
    inputs: Mapping[str, str]
    macs: Callable[[int, int], float] | None
    states: Mapping[str, str] = field(default_factory=lambda: {"S": "KV"})
    constants: Mapping[str, Any] = field(default_factory=dict)
    elementwise: float = 0.0

    def draw(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        drawn: dict[str, Tensor] = {}
        for name, kind in self.inputs.items():
            drawn[name] = KINDS[kind](Draw(sizes, dtype, device, generator, drawn))
        return {name: x.requires_grad_() for name, x in drawn.items()}

    def draw_states(self, sizes: Sizes, count: int, device: str, seed: int) -> dict[str, Tensor]:
        """Initial states of `count` sequences: normal numbers, or where the state is a sum of squares what those look like."""
        generator = torch.Generator(device).manual_seed(seed)
        states = {}
        for name, shape in self.states.items():
            if name == "count":
                states[name] = torch.arange(count, device=device)
                continue
            x = torch.randn(count, sizes.heads, *(getattr(sizes, d) for d in shape), device=device, generator=generator)
            if shape == "K" or name == "J":
                x = x.square() * 4 / sizes.K
            elif shape == "KK":
                x = x @ x.mT / sizes.K
                if name in ("P", "A"):  # inverses, which no direction may leave
                    x += torch.eye(sizes.K, device=device)
            elif name == "J":
                x = x.square() / sizes.K
            states[name] = x.requires_grad_()
        return states

    def ours(self, inputs: Mapping[str, Tensor], backend: str = "auto", **more: Any) -> tuple[Tensor, Any]:
        return self.op(**inputs, **{**self.constants, **more}, backend=backend)

    def bytes(self, inputs: Mapping[str, Tensor], backward: bool) -> int:
        """Every input read and the output written once; with the backward also dO, the inputs again and their gradients."""
        read = sum(x.numel() * x.element_size() for x in inputs.values())
        o = inputs["v"].numel() * inputs["v"].element_size()
        return 3 * read + 2 * o if backward else read + o

    def seconds(self, sizes: Sizes, backward: bool, ceilings: Ceilings) -> float:
        """What the operations take at least."""
        tokens = sizes.B * sizes.T * sizes.heads * (3 if backward else 1)
        products = 0.0 if self.macs is None else 2 * self.macs(sizes.K, sizes.V) / ceilings.rate
        return tokens * (products + self.elementwise * sizes.K * sizes.V / ceilings.float32)


class Draw(NamedTuple):
    """What a kind of input is drawn from."""

    sizes: Sizes
    dtype: torch.dtype
    device: str
    generator: torch.Generator
    drawn: Mapping[str, Tensor]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.sizes.B, self.sizes.T, *shape, device=self.device, generator=self.generator)

    def positive(self) -> Tensor:
        """As ELU + 1 leaves queries and keys."""
        return (F.elu(self.normal(self.sizes.H, self.sizes.K)) + 1).to(self.dtype)

    def penalty(self) -> Tensor:
        return (F.normalize(self.normal(self.sizes.H, self.sizes.K), dim=-1) * self.sizes.K**-0.5).to(self.dtype)

    def key(self) -> Tensor:
        return F.normalize(self.normal(self.sizes.H, self.sizes.K), dim=-1).to(self.dtype)

    def write_key(self) -> Tensor:
        """Near the key: an unrelated one would make the memory diverge."""
        k = self.drawn["k"].detach()
        return (k * torch.exp(0.4 * self.normal(self.sizes.H, self.sizes.K).tanh())).to(self.dtype)

    def value(self) -> Tensor:
        return self.normal(self.sizes.heads, self.sizes.V).to(self.dtype)

    def joint_value(self) -> Tensor:
        return F.normalize(self.normal(self.sizes.heads, self.sizes.V), dim=-1).to(self.dtype)

    def value_gain(self) -> Tensor:
        return self.normal(self.sizes.heads, self.sizes.V).sigmoid()

    def gain(self) -> Tensor:
        return self.normal(self.sizes.heads).sigmoid()

    def decay(self) -> Tensor:
        """Half-lives from a few to hundreds of tokens."""
        return F.logsigmoid(self.normal(self.sizes.heads) + 2) / 8

    def channel_decay(self) -> Tensor:
        return F.logsigmoid(self.normal(self.sizes.heads, self.sizes.K) + 2) / 8

    def kept(self) -> Tensor:
        return self.decay().exp()

    def prior(self) -> Tensor:
        return torch.ones(self.sizes.heads, device=self.device)

    def center(self) -> Tensor:
        return torch.full((self.sizes.heads,), -0.2, device=self.device)

    def ridge(self) -> Tensor:
        shape = (self.sizes.heads, self.sizes.K)
        return 0.25 + F.softplus(torch.randn(shape, device=self.device, generator=self.generator))


KINDS: dict[str, Callable[[Draw], Tensor]] = {
    "query": Draw.key, "key": Draw.key, "write key": Draw.write_key, "value": Draw.value, "gate": Draw.gain,
    "decay": Draw.decay, "channel decay": Draw.channel_decay, "center": Draw.center, "ridge": Draw.ridge,
    "value gate": Draw.value_gain, "joint value": Draw.joint_value, "kept": Draw.kept, "prior": Draw.prior,
    "positive query": Draw.positive, "positive key": Draw.positive, "penalty": Draw.penalty,
}  # fmt: skip


def find_spec(op: Callable[..., Any]) -> Any:
    """The declaration of an op, also of one from an older checkout, whose ops do not hold theirs."""
    if hasattr(op, "spec"):
        return op.spec
    from fastweights.ops.framework.spec import spec_of

    return spec_of(op)


def declared(op: Callable[..., Any], form: str, elementwise: float = 0.0, **constants: Any) -> Case:
    """The op in a form that its declaration lists: its inputs, states and cost."""
    spec = find_spec(op)
    given = spec.cases[form].given
    inputs = {
        name: f"channel {role.kind}" if given.get(name) == "GK" else role.kind
        for name, role in spec.inputs.items()
        if name in given or not getattr(role, "optional", False)
    }
    states = {name: state.dims.removeprefix("G") for name, state in spec.states.items()}
    return Case(op, inputs, spec.macs, states, constants, elementwise)


CASES: dict[str, Case] = {
    "linear": declared(ops.linear_attention, "none"),
    "simple_gla": declared(ops.linear_attention, "head"),
    "gla": declared(ops.linear_attention, "channel"),
    "deltanet": declared(ops.delta_rule, "none"),
    "gdn": declared(ops.delta_rule, "head"),
    "gdn-write": declared(ops.delta_rule, "head-write"),
    "kda": declared(ops.delta_rule, "channel"),
    "pgdn": declared(ops.preconditioned_delta_rule, "head"),
    "pkda": declared(ops.preconditioned_delta_rule, "channel"),
    "mesa": declared(ops.mesa, "", iterations=30, scale=1.0),
    "gka": declared(ops.gated_kalmanet, "chebyshev", iterations=30),
    "rls": declared(ops.recursive_least_squares, "none"),
    "vla": declared(ops.variational_linear_attention, "refresh", refresh_every=20),
    "palimpsa": declared(ops.palimpsa, "", elementwise=9.0),
    "longhorn-elementwise": declared(ops.elementwise_longhorn, "", elementwise=7.0),
    **{
        f"lattice-{objective}": declared(ops.lattice, f"{objective}-decay", elementwise=operations, objective=objective)
        for objective, operations in (("decode", 11.0), ("encode", 9.0), ("similarity", 9.0))
    },
    "ttt": declared(ops.output_normalized_ttt, "", elementwise=6.0),
}
