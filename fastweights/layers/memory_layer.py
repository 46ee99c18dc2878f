"""The skeleton of the memory layers: projections, then the layer's own rule, then the output.

A layer names its op (`op`) and says which options it has, which modules compute its gates (`build`) and how the memory is
written and read (`rule`). The declaration of the op says what the memory is called and how many numbers it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ..ops.authoring import ContextParallel, InPlace, Op, State, count_numbers, read_rows, spec_of
from .cache import LayerCache, check_memory
from .heads import HeadSizes
from .mixer import ConfiguredMixer, check_input
from .options import MemoryOptions, ProjectionOptions
from .projections import OutputProjection, QKVProjection, SharedQKProjection, ValueSkip
from .shared_input import Products, first_products, trains_on_gpu
from .wrapped import is_bare

__all__ = ["Answer", "MemoryLayer", "OpLayer", "RuleCall"]

# The answers [B, T, G, V] of a memory, and the memory after them by name, None where there is no cache to keep it.
Answer = tuple[Tensor, dict[str, Tensor | None]]


class RuleCall:
    """One call of a layer: passes cache, lengths, backend and ranks on to the ops that the layer's rule calls.

    Attributes:
        memory: what the cache holds from earlier calls, by name; empty at the start of the sequences.
        context: the other tensors that the cache holds from earlier calls.
        new_context: tensors for the next call beside the memory; a rule may add to them.
        products: products of the layer's input that are there already, by the module.
        for_output: what the layer's `read_out` gets by name beside the usual; a rule may add to it.
    """

    __slots__ = ("context", "for_output", "keywords", "memory", "new_context", "products", "rows")

    def __init__(
        self,
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        backend: str,
        conv_states: dict[str, Tensor] | None = None,
        cp_group: ContextParallel | None = None,
        products: Products | None = None,
    ) -> None:
        self.products = products
        self.memory: dict[str, Tensor] = {} if cache is None else cache.memory
        self.rows = None if cache is None else cache.rows
        self.context: dict[str, Tensor] = {} if cache is None else cache.context
        self.new_context = {} if conv_states is None else conv_states
        self.for_output: dict[str, Tensor] = {}
        self.keywords: dict[str, Any] = {
            "output_final_state": cache is not None,
            "cu_seqlens": cu_seqlens,
            "backend": backend,
        }
        if cp_group is not None:
            self.keywords["cp_group"] = cp_group

    def cache_before(self) -> LayerCache | None:
        """A cache of the memory and context before this call; None at the start of the sequences."""
        return LayerCache(dict(self.memory), dict(self.context)) if self.memory else None

    def count(self, x_BTD: Tensor) -> int:
        """Number of sequences in x."""
        cu_seqlens = self.keywords["cu_seqlens"]
        return len(x_BTD) if cu_seqlens is None else len(cu_seqlens) - 1

    def __call__(
        self,
        op: Callable[..., Any],
        *inputs: Any,
        state: Sequence[str] | None = None,
        keep: bool = True,
        **options: Any,
    ) -> tuple[Any, dict[str, Tensor | None]]:
        """Call `op` from the memory's tensors: all that belong to its state, or none at the start of the sequences.

        Args:
            inputs, options: of the op.
            state: the names of its state in the memory; those of its declaration when None.
            keep: whether the memory moves on. False where another call keeps the same state of the same tokens.

        Returns:
            What the op gives (a tuple where it gives several tensors), and the memory after it by name, None where there is no
            cache to keep it.
        """
        names = tuple(spec_of(op).states if state is None else state)
        check_memory(self.memory, names)
        held = tuple(self.memory[name] for name in names) if names[0] in self.memory else None
        if self.rows is not None and held is not None and not keep:
            held = tuple(read_rows(x, self.rows) for x in held)
        initial: Any = held[0] if held is not None and len(held) == 1 else held
        keywords = {**self.keywords, **options}
        if not keep:
            keywords["output_final_state"] = False
        elif self.rows is not None:  # the op overwrites what the memory holds
            initial = InPlace(initial, self.rows)
        *outputs, final = op(*inputs, initial_state=initial, **keywords)
        o = outputs[0] if len(outputs) == 1 else tuple(outputs)
        if isinstance(initial, InPlace):
            return o, dict(zip(names, held or ()))
        finals = (final,) if len(names) == 1 else final or (None,) * len(names)
        return o, dict(zip(names, finals, strict=True))


class OpLayer(ConfiguredMixer):
    """A mixer whose memory is the state of an op.

    Attributes:
        op: the op. A layer whose options choose between ops, or that keeps the states of several, defines `states` instead.
        heads: numbers and widths of the heads.
    """

    op: ClassVar[Op[..., Any]]
    heads: HeadSizes

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        """The memory of a layer with these options by name, as the declarations of its ops describe it."""
        if not hasattr(cls, "op"):
            raise NotImplementedError(f"{cls.__name__} must have the attribute op, or a method states or state_size")
        return cls.op.spec.states

    def state_size(self, length: int = 1) -> int:
        heads = self.heads
        return count_numbers(self.states(self.options).values(), heads.value_heads, heads.key, heads.value)


class MemoryLayer(OpLayer):
    """A mixer of projections to q, k and v, a memory rule and an output projection.

    Subclasses set `Options` and `op` and define `build` and `rule`; `states`, `build_projection`, `build_output` and `read_out`
    where theirs differ. Modules are created in the order projection, `build`, output, which is the order of random draws.

    Attributes:
        options: the layer's options, frozen.
        needs_activation: whether the rule needs the activation of q, k and v, also next to trained weights (`linearize`).
    """

    Options: ClassVar[type[ProjectionOptions]] = MemoryOptions
    needs_activation: ClassVar[bool] = False
    serves_context_parallel = True
    probes = {"q": "", "k": "", "v": "", "o": "", "output_gate": "options.output_gate", "state": ""}
    head_counts = ("num_v_heads", "num_heads")
    options: ProjectionOptions
    skip: ValueSkip | None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heads = self.options.head_sizes()
        self.build_projection()
        self.build()
        self.build_output()

    def build_projection(self, normalize_qk: bool | None = None) -> None:
        """Create `self.qkv`. normalize_qk: whether it divides q and k by their length; None follows the option."""
        options = cast(MemoryOptions, self.options)
        projection = SharedQKProjection if options.shared_qk else QKVProjection
        self.qkv = projection(
            self.hidden_size,
            self.heads,
            options.conv_size,
            options.activation,
            options.normalize_qk if normalize_qk is None else normalize_qk,
            options.backend,
            options.conv_init,
            options.steps,
        )

    def build(self) -> None:
        """Create the modules of the layer's own: gates, decays, preconditioners."""

    def build_output(self) -> None:
        """Create the modules that `read_out` uses."""
        options = cast(MemoryOptions, self.options)
        self.output = OutputProjection(
            self.hidden_size,
            self.heads,
            options.output_gate,
            options.gate_low_rank,
            options.norm_eps,
            options.backend,
            options.output_norm,
        )
        if not hasattr(self, "skip"):  # the layers of Palimpsa have built theirs
            first = options.skip_init
            self.skip = None if first is None else ValueSkip(self.heads.value_heads, first)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(self, x_BTD, cache, cu_seqlens)
        products = self._first_products() if trains_on_gpu(x_BTD) else {}
        given = {**self.cp_keywords, "products": products} if products else self.cp_keywords
        q_BTHK, k_BTHK, v_BTGV, conv_states = self.qkv(x_BTD, cache, cu_seqlens, **given)
        return self._remember(x_BTD, q_BTHK, k_BTHK, v_BTGV, conv_states, cache, cu_seqlens, products)

    def gates(self) -> Sequence[nn.Module | None]:
        """Gates of x whose first products may be computed with those of q, k and v; `rule` passes `run.products` to
        `compute_gates`."""
        return ()

    def _first_products(self) -> Products:
        """The modules whose products with x may be computed with those of q, k and v: none without gates."""
        products, gate = first_products(self.gates()), self._low_rank_gate()
        return {**products, gate: None} if products and gate is not None else products

    def _low_rank_gate(self) -> nn.Module | None:
        output = getattr(self, "output", None)  # a layer may read out by modules of its own
        return output.low_rank_part() if isinstance(output, OutputProjection) else None

    def mix_projected(
        self, x_BTD: Tensor, flat: list[Tensor], cache: LayerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """What `forward` does after the projections of q, k and v [B, T, channels], which another module has made."""
        q_BTHK, k_BTHK, v_BTGV, conv_states = self.qkv.finish(flat, cache, cu_seqlens, **self.cp_keywords)
        return self._remember(x_BTD, q_BTHK, k_BTHK, v_BTGV, conv_states, cache, cu_seqlens)

    def _remember(
        self,
        x_BTD: Tensor,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTGV: Tensor,
        conv_states: dict[str, Tensor],
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        products: Products | None = None,
    ) -> Tensor:
        """Write the memory, read it, and bring the cache up to date. conv_states: of the convolutions, for the next call.
        products: of `RuleCall`."""
        self.probe(q=q_BTHK, k=k_BTHK, v=v_BTGV)
        run = RuleCall(cache, cu_seqlens, self.options.backend, conv_states, self.cp_group, products)
        low_rank = products.get(cast(Any, self._low_rank_gate())) if products else None
        if low_rank is not None:
            run.for_output["low_rank_BTR"] = low_rank
        o_BTGV, memory = self.rule(x_BTD, q_BTHK, k_BTHK, v_BTGV, run)
        self.probe(o=o_BTGV)
        if cache is not None:
            cache.update(memory, run.new_context)
        return self.read_out(o_BTGV, v_BTGV, x_BTD, **run.for_output)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        """Compute the gates, write the memory and read it: the answers [B, T, G, V] and the memory by name.

        Calls the op as run(self.op, q, k, v, ...).
        """
        raise NotImplementedError

    def read_out(self, o_BTGV: Tensor, v_BTGV: Tensor, x_BTD: Tensor, **for_gate: Tensor) -> Tensor:
        """The layer's output [B, T, D] for the memory's answers. for_gate: shift_BTGV and low_rank_BTR of `OutputProjection`,
        if there are any."""
        self.probe(output_gate=lambda: self.output.gate_values(x_BTD, **for_gate))
        if self.skip is None:
            return self.output(o_BTGV, x_BTD, **for_gate)
        if self.output.norm is not None and is_bare(self.skip, ValueSkip):
            return self.output(o_BTGV, x_BTD, v_BTGV, self.skip.D, **for_gate)
        return self.output(self.skip(o_BTGV, v_BTGV), x_BTD, **for_gate)
