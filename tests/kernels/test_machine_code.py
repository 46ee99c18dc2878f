"""Every kernel as GPUs get it, compiled without one: it fits Ampere and Hopper and stays in their registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from fastweights.ops import palimpsa
from fastweights.testing import OpCase, OpInputs
from tests.ops.kernel_launches import Compilation, recorded

from . import forms
from .cases import KERNEL_CASES, ONE_OF_EACH_FAMILY
from .pipelining import overwritten_operands
from .reductions import disordered_reductions
from .scoreboards import early_reads, late_writes, read_instructions, register_hazards

pytestmark = pytest.mark.compiler
# Bytes that a program may have (CUDA programming guide, compute capabilities).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Bytes per thread, with the compiler of this version of Triton. A state and its gradient fill the registers; a warp holds slots,
# steps and products of a chunk; the registers of Palimpsa's backward are limited, so that more programs run, as are those of
# matrices of 128 channels; conjugate gradients hold four tiles of a chunk.
RECORDED_WITH = "3.6."
SPILLED = {
    "summarize_elements": 56,
    "read_chunk": 216,
    "differentiate_chunk": 648,  # at 128 channels; at 64 channels 40
    "block_systems": 616,  # in float32 with 128 channels, outside of any loop; in 16 bits none
    "pass_gradients": 16,  # at 128 channels, with states before and after
    "pass_tokens_back": 224,
    "decode_tokens": 304,  # on sm_80; on sm_90 40
    "decode_tokens_back": 280,  # on sm_80; on sm_90 56
    "read_slots": 224,
    "turn_slots": 16,
    "turn_slots_back": 64,
    "slot_gradients": 504,
    "prepare_turns_back": 224,  # on sm_80; on sm_90 40
    "posterior_gradients": 400,
    "invert_sums": 288,
    "solve_segment": 560,  # what a chunk's tokens are found from, while they are eliminated
    "solve_tokens": 568,  # with 128 registers, so that two programs run
    "chunk_adjoint": 256,
    "carry_inverse": 896,  # at 128 channels; at 64 channels 216
    "finish_gradients": 24,
    "decode_inverse_gram": 64,
    "chunk_gradients_channel": 16,  # with write keys at 128 channels
    "chunk_state_backward": 16,  # of variational linear attention at 128 channels
    "segment_sums": 128,  # on sm_80: the tiles are those of Hopper; on sm_90 8
    "segment_gradients": 448,
    "unit_key_gradients": 80,  # with 128 registers, so that two programs run
    "solve_chunk": 960,
    "backward_kernel": 16,  # of the convolution, outside of its loop
    "rotate_into_ring": 32,  # no spill: cosines of large angles work on an array
    "decode_systems": 64,
    "system_gradients": 960,
}
# On sm_80 at 128 channels, where more is allowed than above. The tiles are those of Hopper, and no such GPU has run them.
SPILLED_AT_128_ON_80 = {
    "carry_adjoint": 800,
    "carry_inverse": 21784,
    "chunk_adjoint": 632,
    "chunk_state": 8,
    "chunk_state_backward": 336,
    "gram_sums_back": 88,
    "invert_sums": 1168,
    "pass_gradients": 120,
    "pass_tokens_back": 688,
    "posterior_gradients": 424,
    "posterior_state": 80,
    "prepare_turns_back": 232,
    "read_chunk": 408,
    "segment_gradients": 15184,
    "segment_sums": 1632,
    "slot_gradients": 536,
    "solve_segment": 3640,
    "solve_tokens": 1224,
    "system_gradients": 11288,
    "token_products": 136,
    "unit_key_gradients": 120,
}


def launch(
    case: OpCase,
    width: int,
    time: int,
    heads: int,
    with_states: bool,
    value: int | None = None,
    groups: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Forward and backward of the op, on zeros; heads: of keys, each for `groups` of values."""
    value = width if value is None else value
    drawn = case.draw(batch=1, time=1, heads=heads, key=width, value=value, value_heads=groups * heads)
    tokens = {name: torch.zeros(1, time, *x.shape[2:], dtype=dtype) for name, x in drawn.tokens.items()}
    inputs = OpInputs(tokens, {name: torch.ones(heads) for name in case.parameters}).map(Tensor.requires_grad_)
    keywords = {}
    if with_states:
        sizes = {"GKV": (heads, width, value), "GKK": (heads, width, width), "GK": (heads, width), "": ()}
        states = tuple(
            torch.zeros(1, *sizes[state.dims], dtype=torch.int64 if state.counts else None).requires_grad_(
                not state.counts
            )
            for state in case.spec.states.values()
        )
        keywords = {"initial_state": case.initial_state(states), "output_final_state": True}
    o, state = case.op(**inputs.arguments(), **case.case.options, **keywords, backend="triton")
    states = state if isinstance(state, tuple) else () if state is None else (state,)
    results = [x for x in (o, *states) if x.requires_grad]
    torch.autograd.backward(results, list(map(torch.zeros_like, results)))


@pytest.fixture(autouse=True)
def on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops let their kernels have these, as they do in the interpreter."""
    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", True)


@pytest.fixture(autouse=True)
def tiles_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as that GPU gets them."""
    large = "capability" not in request.fixturenames or request.getfixturevalue("capability") >= 90
    monkeypatch.setattr("fastweights.kernels.common.call.has_large_shared_memory", lambda device: large)


def all_forms(launches: Iterable[Callable[[], object]]) -> list[Compilation]:
    return list({one.key: one for call in launches for one in recorded(call)}.values())


def first_forms(launches: Iterable[Callable[[], object]]) -> list[Compilation]:
    """Every kernel in the form that is launched first: compiling takes seconds per form."""
    return list({one.kernel.fn: one for one in reversed(all_forms(launches))}.values())


def check_compiled(kernels: list[Compilation], capability: int) -> None:
    import triton

    assert kernels
    wrong, spills_are_known = [], triton.__version__.startswith(RECORDED_WITH)
    for one in kernels:
        compiled = one.compile(capability)
        of_chunk = one.kernel.fn.__module__.startswith(("fastweights.kernels.chunk.", "fastweights.kernels.common."))
        in_float32 = of_chunk and not {"*bf16", "*fp16"} & set(one.signature.values())
        name = one.kernel.__name__
        allowed = 1200 if in_float32 else SPILLED.get(name, 0)  # see docs/kernels.md
        if capability == 80 and 128 in (one.choices.get("K"), one.choices.get("V")):
            allowed = max(allowed, SPILLED_AT_128_ON_80.get(name, 0))
        if compiled.shared > SHARED[capability] or (spills_are_known and compiled.stack > allowed):
            wrong.append(f"{name}: {compiled.shared} bytes of shared memory, {compiled.stack} spilled; {one.choices}")
        wrong += [f"{name}: {operand} overwritten; {one.choices}" for operand in overwritten_operands(compiled.ttgir)]
        wrong += [f"{name}: {each}; {one.choices}" for each in disordered_reductions(compiled.ttgir)]
        wrong += [f"{name}: {each}; {one.choices}" for each in register_hazards(compiled.sass)]
    assert not wrong, "\n".join(wrong)


# One form or more of every family, forwards and backwards. Lattice's other forms take half a minute; of those, the two kernels of
# the backward whose layouts matter are compiled below.
CHOSEN = [
    ("delta_rule-head-write", "bfloat16", 128, 90),
    ("preconditioned_delta_rule-channel", "bfloat16", 128, 90),
    ("linear_attention-head", "bfloat16", 64, 80),
    ("elementwise_longhorn", "bfloat16", 64, 90),
    ("palimpsa", "bfloat16", 32, 90),
    ("lattice-decode", "bfloat16", 64, 90),
    ("output_normalized_ttt", "bfloat16", 64, 90),
    ("recursive_least_squares-none", "bfloat16", 128, 90),
    ("gated_kalmanet-chebyshev", "bfloat16", 64, 90),
    ("variational_linear_attention-refresh", "bfloat16", 64, 90),
]
MORE = [
    ("delta_rule-channel", "bfloat16", 64, 80),
    ("lattice-decode", "bfloat16", 128, 90),
    ("lattice-encode-decay", "bfloat16", 64, 90),
    ("lattice-similarity-free", "float16", 64, 80),
    ("palimpsa_posterior", "bfloat16", 128, 90),
    ("palimpsa", "float16", 128, 80),
    ("elementwise_longhorn", "float16", 128, 80),
    ("linear_attention-head", "bfloat16", 128, 90),
    ("precondition_keys", "float16", 128, 90),
    ("precondition_queries", "bfloat16", 128, 90),
    ("precondition_queries", "float16", 64, 80),
    ("precondition_keys-unstable", "bfloat16", 128, 90),
    ("gated_kalmanet-chebyshev", "bfloat16", 128, 90),
    ("mesa", "bfloat16", 128, 90),
    ("mesa", "float16", 64, 80),
    ("delta_rule-head", "bfloat16", 64, 90),
    ("delta_rule-head", "bfloat16", 128, 80),
    ("variational_linear_attention-refresh", "bfloat16", 128, 90),
    ("variational_linear_attention-plain", "bfloat16", 64, 90),
    ("recursive_least_squares-none", "float16", 128, 80),
    ("output_normalized_ttt", "bfloat16", 128, 90),
]


FORM = ("name", "dtype", "width", "capability")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --every-form all of them, which takes many minutes."""
    if metafunc.function is test_all_forms_of_memory:
        chosen = [*CHOSEN, *MORE]
        if metafunc.config.getoption("--every-form"):
            chosen = list(product(KERNEL_CASES, ("bfloat16", "float16"), (64, 128), (80, 90)))
        metafunc.parametrize(FORM, chosen)


def misplaced(instructions: Iterable[str]) -> list[str]:
    """Sums of 64 bits, as of operands' places in shared memory, whose upper half takes the register of the lower half: what the
    assembler of CUDA 12.8 makes of some."""
    found, lower, defined = [], {}, {}
    for at, instruction in enumerate(instructions):
        if upper := re.match(r"U?IADD3\.X \w+, (U?R\d+)(?:\.reuse)?, -?0x\w+, U?RZ, (U?P\d), ", instruction):
            register, since = lower.get(upper[2], (None, 0))
            if register == upper[1] and defined.get(register, -1) < since:
                found.append(instruction)
        if low := re.match(r"U?IADD3 \w+, (U?P\d), (U?R\d+)(?:\.reuse)?, -?0x\w+, U?RZ$", instruction):
            lower[low[1]] = low[2], at
        if result := re.match(r"(?!ST|HGMMA)[A-Z0-9_.]+ (?:U?P\w+, )*(U?R)(\d+)\b", instruction):
            for register in range(int(result[2]), int(result[2]) + 2):  # 64-bit results take two
                defined[f"{result[1]}{register}"] = at
    return found


@pytest.mark.slow
def test_small_tiles_are_assembled_right() -> None:
    """Narrow heads with one decay per channel: of the kernels that CUDA 12.8's assembler got wrong for Hopper."""
    call = partial(
        launch, KERNEL_CASES["delta_rule-channel-write"], 20, time=256, heads=2, with_states=False, value=37, groups=3
    )
    kernels = [
        one for one in recorded(call) if one.kernel.__name__ in ("wy_transform_channel", "chunk_gradients_channel")
    ]
    assert len(kernels) == 4
    for one in kernels:
        instructions = one.compile(90).instructions
        assert sum(x.startswith("HGMMA") for x in instructions) > 0
        assert not misplaced(instructions), one.choices


def test_a_wrong_sum_is_recognized() -> None:
    right = ["UMOV UR4, URZ", "UIADD3 UR8, UP0, UR6, 0x80, URZ", "UIADD3.X UR9, UR4, 0x40000040, URZ, UP0, !UPT"]
    wrong = ["UIADD3 UR4, UP0, UR10, 0x40, URZ", "UIADD3.X UR7, UR10, -0x7fffffe0, URZ, UP0, !UPT"]
    assert not misplaced(right) and misplaced(wrong) == wrong[1:]


@pytest.mark.slow
def test_tokens_stay_in_lanes() -> None:
    """Where lanes hold the tokens of a slot, only matrix products go through shared memory. Triton chooses the layouts: another
    choice made 124 barriers."""
    call = partial(launch, KERNEL_CASES["lattice-encode-decay"], 64, time=256, heads=8, with_states=False)
    (one,) = (x for x in recorded(call) if x.kernel.__name__ == "turn_slots_back")
    assert sum(x.startswith("BAR.SYNC") for x in one.compile(90).instructions) <= 16


@pytest.mark.parametrize("sizes", [(20, 37), (64, 64)], ids=str)
def test_steps_that_do_not_commute_stay_in_order(sizes: tuple[int, int]) -> None:
    """Triton chooses the layouts: another choice gave wrong gradients for heads of at most 32 slots."""
    call = partial(
        launch, KERNEL_CASES["lattice-similarity-decay"], sizes[0], time=64, heads=2, with_states=False, value=sizes[1]
    )
    (one,) = (x for x in recorded(call) if x.kernel.__name__ == "prepare_turns_back")
    ttgir = one.compile(90).ttgir
    assert len(re.findall(r'"tt\.reduce"\(%[\w:#]+, ', ttgir)) == 16 and not disordered_reductions(ttgir)


LOOP = """
    %S = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %S[%zero] : x
    %a = ttg.async_copy_global_to_local %p, %first mask %m
    %second = ttg.memdesc_index %S[%one] : x
    %b = ttg.async_copy_global_to_local %p, %second mask %m
    %o = scf.for %i = %zero to %n step %one
      %now = ttg.memdesc_index %S[%at] : x
      %turned = ttg.memdesc_trans %now : x
      %early = ttng.warp_group_dot %q, %turned, %x
      %late = ttng.warp_group_dot %q, %turned, %y
      %done = ttng.warp_group_dot_wait %early, %late {{pendings = {pendings} : i32}}
      %next = ttg.memdesc_index %S[%later] : x
      %c = ttg.async_copy_global_to_local %p, %next mask %m
    }}
"""


@pytest.mark.parametrize(("buffers", "pendings", "wrong"), [(2, 0, []), (2, 1, ["%late: %S"]), (3, 2, [])])
def test_an_overwritten_operand_is_recognized(buffers: int, pendings: int, wrong: list[str]) -> None:
    assert overwritten_operands(LOOP.format(buffers=buffers, pendings=pendings)) == wrong


# Of a kernel that the assemblers of CUDA 12.8 and 12.9 got wrong: the fence held the scoreboard that the load took next.
FENCED = """
        /*61c0*/   FENCE.VIEW.ASYNC.S ;                    /* 0x00000000000073c6 */
                                                           /* 0x002e640000000000 */
        /*61d0*/   NOP ;                                   /* 0x0000000000007918 */
                                                           /* 0x002fe20000000000 */
        /*61e0*/   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;         /* 0x00008000000079c5 */
                                                           /* 0x000fc40000010000 */
        /*61f0*/   LDS.128 R164, [R12+UR4+0xc000] ;        /* 0x00c000040ca47984 */
                                                           /* 0x000e680008000c00 */
        /*6200*/   LDS.128 R156, [R12+UR4+0xc800] ;        /* 0x00c800040c9c7984 */
                                                           /* 0x000ea20008000c00 */
"""
READ = """
        /*6210*/   PRMT R134, R165, 0x7632, R134 ;         /* 0x00007632a4867816 */
                                                           /* 0x{waits}fc40000000086 */
"""
ON_FIRST, ON_SECOND, ON_NONE = "002", "004", "000"  # a bit per scoreboard; the loads hold 1 and 2


@pytest.mark.parametrize("waits", [ON_FIRST, ON_SECOND, ON_NONE])
def test_an_early_read_is_recognized(waits: str) -> None:
    """Loads from shared memory end in order: a wait for the second is one for the first."""
    wrong = ["PRMT R134, R165, 0x7632, R134: LDS.128 R164, [R12+UR4+0xc000]"] if waits == ON_NONE else []
    assert early_reads(read_instructions(FENCED + READ.format(waits=waits))) == wrong


# Of another, which the assembler of CUDA 12.8 got wrong: a constant is loaded into an operand's register behind the product.
PRODUCTS = """
        /*e5c0*/   HGMMA.64x64x16.F32.BF16 R88, R184, gdesc[UR44].tnspB, R88 ;          /* 0x40e000002c587df0 */
                                                                                        /* 0x000fe40008701858 */
        /*e5d0*/   HGMMA.64x64x16.F32.BF16 R88, R192, gdesc[UR48].tnspB, R88, gsb0 ;    /* 0x40e0000030587df0 */
                                                                                        /* 0x000fe40008001858 */
"""
WAITED_FOR = """
        /*e5e0*/   WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;                                 /* 0x00008000000079c5 */
                                                                                        /* 0x000fc40000010000 */
"""
LATE = """
        /*e5f0*/   IMAD.MOV.U32 {register}, RZ, RZ, 0x3f803f80 ;                        /* 0x3f803f80ffc27424 */
                                                                                        /* 0x000fe200078e00ff */
"""


@pytest.mark.parametrize(("left", "register", "is_wrong"), [(1, "R194", True), (1, "R196", False), (0, "R194", False)])
def test_a_late_write_is_recognized(left: int, register: str, is_wrong: bool) -> None:
    sass = PRODUCTS + WAITED_FOR.format(left=left) + LATE.format(register=register)
    found = late_writes(read_instructions(sass))
    product = "HGMMA.64x64x16.F32.BF16 R88, R192, gdesc[UR48].tnspB, R88, gsb0"
    assert found == [f"IMAD.MOV.U32 {register}, RZ, RZ, 0x3f803f80: {product}"] * is_wrong


def in_segments(name: str, dtype: str, width: int) -> Callable[[], None]:
    """One sequence in segments, with states before and after: every kernel of the op."""
    return partial(launch, KERNEL_CASES[name], width, time=4096, heads=2, with_states=True, dtype=getattr(torch, dtype))


# The others take a minute; test_every_gpu compiles those of linear attention.
FAST_MEMORIES = ("elementwise_longhorn",)


@pytest.mark.parametrize(
    FORM, [pytest.param(*x, marks=() if x[0] in FAST_MEMORIES else pytest.mark.slow) for x in CHOSEN]
)
def test_memory(name: str, dtype: str, width: int, capability: int) -> None:
    """Every kernel once: those of matrix states, which most rules launch, for the rules that launch no others."""
    kernels = first_forms([in_segments(name, dtype, width)])
    if KERNEL_CASES[name].spec.name not in ("linear_attention", "delta_rule", "preconditioned_delta_rule"):
        kernels = [one for one in kernels if ".common.delta_rule." not in one.kernel.fn.__module__]
    check_compiled(kernels, capability)


@pytest.mark.slow
def test_all_forms_of_memory(name: str, dtype: str, width: int, capability: int) -> None:
    """Sequences walked whole too."""
    case = KERNEL_CASES[name]
    whole = partial(launch, case, width, time=256, heads=8, with_states=False, dtype=getattr(torch, dtype))
    check_compiled(all_forms([whole, in_segments(name, dtype, width)]), capability)


@pytest.mark.slow
def test_writes_in_float32() -> None:
    """Of output-normalised TTT, which has another kernel for them in 16 bits."""
    kernels = recorded(in_segments("output_normalized_ttt", "float32", 64))
    check_compiled([one for one in kernels if one.kernel.__name__ == "write_tokens"], 90)


def read_of_narrow_heads() -> Compilation:
    """Of Palimpsa, in the 170M preset."""
    inputs = [torch.zeros(16, 2048, 16, 48, dtype=torch.bfloat16) for _ in range(4)]
    kernels = recorded(lambda: palimpsa(*inputs, torch.zeros(16, 2048, 16), backend="triton"))
    (read,) = (one for one in kernels if one.kernel.__name__ == "read_posterior")
    return read


def test_narrow_heads_are_read_in_three_blocks() -> None:
    assert read_of_narrow_heads().choices["BLOCKS"] == 3


@pytest.mark.slow
def test_reading_narrow_heads_spills_nothing() -> None:
    assert read_of_narrow_heads().compile(90).stack == 0


@pytest.mark.parametrize(("width", "parts", "registers"), [(48, 6, 168), (64, 8, 255), (96, 4, 168), (128, 8, 255)])
def test_tiles_of_palimpsas_gradients(width: int, parts: int, registers: int) -> None:
    """No key channel of a tile is idle, and tiles of 64 channels have the registers that they need."""
    inputs = [torch.zeros(8, 2048, 8, width, dtype=torch.bfloat16).requires_grad_() for _ in range(4)]

    def step() -> None:
        o, _ = palimpsa(*inputs, torch.zeros(8, 2048, 8), backend="triton")
        o.backward(torch.zeros_like(o))

    (one,) = (one for one in recorded(step) if one.kernel.__name__ == "posterior_gradients")
    assert width % (8 * parts) == 0 and one.choices["PARTS"] == parts and one.choices["maxnreg"] == registers


AROUND_MEMORIES = {
    call.__name__: call
    for call in (
        forms.decoding,
        forms.gated_norm,
        forms.gated_writes,
        forms.delta_writes,
        forms.positive_keys,
        forms.rwkv7,
        forms.layer_norm,
        forms.convolution_of_packed_rows,
        forms.convolution_of_slices,
        forms.convolution_step,
        forms.linear_rows,
        forms.residual_norm,
        forms.silu_product,
        forms.channel_decay,
        forms.cross_entropy,
        forms.l2_normalize,
        forms.step_decay,
        forms.token_convolution,
        forms.pool_rows,
        forms.ring_attention,
    )
}


FAST_AROUND = ("positive_keys", "layer_norm", "convolution_step")


@pytest.mark.parametrize(
    "launches",
    [pytest.param(x, marks=() if name in FAST_AROUND else pytest.mark.slow) for name, x in AROUND_MEMORIES.items()],
)
def test_around(launches: Callable[[], Iterable[Callable[[], object]]]) -> None:
    check_compiled(first_forms(launches()), 90)


@pytest.mark.slow
@pytest.mark.parametrize("launches", [*AROUND_MEMORIES.values(), forms.convolution_of_rows])
def test_all_forms_around(launches: Callable[[], Iterable[Callable[[], object]]]) -> None:
    check_compiled(all_forms(launches()), 90)


def for_every_gpu(*fast: tuple[str, int]) -> pytest.MarkDecorator:
    """One form of each family at 64 and at 128 channels, and the kernels around the memories; all but `fast` in the slow set.
    `make test-triton` repeats them with other versions of Triton."""

    def marks(name: str, capability: int) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * ((name, capability) not in fast)

    names = [*(f"{name}-{width}" for name in ONE_OF_EACH_FAMILY for width in (64, 128)), *AROUND_MEMORIES]
    return pytest.mark.parametrize(
        ("name", "capability"), [pytest.param(n, c, marks=marks(n, c)) for n in names for c in SHARED]
    )


@for_every_gpu(("linear_attention-none-64", 100), ("step_decay", 100))
def test_every_gpu(name: str, capability: int) -> None:
    """A kernel compiles, and a program finds its shared memory, whatever the version of Triton."""
    if name in AROUND_MEMORIES:
        calls = list(AROUND_MEMORIES[name]())
    else:
        family, _, width = name.rpartition("-")
        calls = [in_segments(family, "bfloat16", int(width))]
    kernels = all_forms(calls)
    assert kernels
    shared = {one.kernel.__name__: one.compile(capability).shared for one in kernels}
    assert {kernel: size for kernel, size in shared.items() if size > SHARED[capability]} == {}
