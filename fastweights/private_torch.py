"""Every private name of torch that fastweights uses, the versions they are tested with, and what happens without them.

In another version a name may be gone. Then a slower way that needs no private name is taken, as each function says; where there
is none, the message says which versions have the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # imports for seconds
    from torch.distributed.checkpoint.staging import DefaultStager

__all__ = [
    "CONVENTIONS",
    "TESTED",
    "all_modules",
    "allow_compilations",
    "autograd_inside_op",
    "change_count",
    "constant_when_traced",
    "copy_all",
    "count_forward_hooks",
    "current_device",
    "current_stream",
    "has_hooks",
    "import_compiler",
    "keep_blocks_whole",
    "keep_staging",
    "product_precision",
    "silence_uncaptured_steps",
    "size_may_change",
    "tensors_of",
]

TESTED = (2, 11), (2, 13)  # first and last minor version

# What torch's own subclasses override as well, and will hardly lose.
CONVENTIONS = {
    "_apply": "nn.Module: called by to(), half() and the like, after which marks of parameters are set again"
}

MANY = 1_000_000  # hooks

Function = TypeVar("Function", bound=Callable[..., Any])

# Asked for every launch of a kernel: torch's public functions do more than to ask. Without a GPU kernels are only
# compiled, never run: tests need a device and a stream all the same.
current_device: Callable[[], int] = (
    getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device) if torch.cuda.is_available() else lambda: -1
)
current_stream: Callable[[int], int] = (
    getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream)
    if torch.cuda.is_available()
    else lambda device: 0
)


def constant_when_traced(function: Function) -> Function:
    """torch.compile calls the function while it traces and keeps the result as a constant. This is what
    torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds. A version that does not
    know the mark traces the function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def import_compiler() -> None:
    """Import what torch would import with the first compile, which takes seconds. A version without that module imports its own
    with the first compile."""
    with suppress(ImportError):
        import_module("torch._inductor.compile_fx")


def allow_compilations(count: int) -> None:
    """Let torch.compile compile one function at least `count` times. A version without this limit has another one, behind which
    it warns and runs the function without compiling it."""
    limits = torch._dynamo.config
    with suppress(AttributeError):
        limits.recompile_limit = max(limits.recompile_limit, count)


def keep_blocks_whole() -> None:
    """Let torch.compile make one graph of a block within DDP, where it would make one for every 25 MB of parameters, so that
    their gradients are reduced sooner. A version without this setting may divide blocks, which only costs launches."""
    with suppress(AttributeError):
        torch._dynamo.config.optimize_ddp = False


def keep_staging(stager: DefaultStager) -> Callable[[], None]:
    """Keep a stager of DCP usable after its first copy: in torch 2.11 and 2.12 it closes its copier then, and the next copy fails
    (pytorch issue 183413). Returns a function that closes the copier. In a version without a copier nothing changes."""
    try:
        copier = stager._state_dict_stager
        close = copier.close
    except AttributeError:
        return lambda: None
    copier.close = lambda: None  # type: ignore[method-assign]
    return close


def size_may_change(x: Tensor, dim: int) -> None:
    """torch.compile must not take the size of a dimension to be the same in every call. A version without this compiles once
    more when the size changes first."""
    with suppress(AttributeError):
        torch._dynamo.maybe_mark_dynamic(x, dim)


@contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Inside an op of torch.library autograd may be off at the dispatcher, which enable_grad does not reach. (Another thread has
    it on, but cannot run a backward on CUDA while the op's own thread is the one that serves it.)

    Raises:
        RuntimeError: this version of torch has no such switch.
    """
    try:
        guard, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
        functionality, views = keys.AutogradFunctionality, keys.ADInplaceOrView
    except AttributeError as error:
        raise RuntimeError(
            f"the gradient of an op without kernels needs a torch that was tested, {_tested()}, got {torch.__version__}: {error}"
        ) from error
    with guard(functionality, False), guard(views, False):
        yield


def _tested() -> str:
    (first, last) = (".".join(map(str, version)) for version in TESTED)
    return f"{first} to {last}"


def change_count(x: Tensor) -> int | None:
    """How often a tensor has been changed in place. None where this version of torch does not tell: whoever keeps something of
    the tensor then reads it again."""
    return getattr(x, "_version", None)


def product_precision() -> str | None:
    """The precision of products in float32 on a GPU. None where this version of torch does not tell: torch 2.9 gave each backend
    a setting of its own, beside which the older function may refuse to answer."""
    own = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    try:
        return torch.get_float32_matmul_precision() if own is None else str(own)
    except RuntimeError:
        return None


def copy_all(into: list[Tensor], given: list[Tensor]) -> None:
    """Copy tensors into others of the same dtypes, with few launches on a GPU. A version without that copies one by one."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is None:
        for one, other in zip(into, given, strict=True):
            one.copy_(other)
        return
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(into, given, strict=True):
        ones, others = by_dtype.setdefault(one.dtype, ([], []))
        ones.append(one)
        others.append(other)
    for ones, others in by_dtype.values():
        together(ones, others)


def all_modules(module: nn.Module) -> list[nn.Module]:
    """The module and all within it, each once, in no order of meaning. `modules()` takes three times as long."""
    found: dict[nn.Module, None] = {}
    left = [module]
    while left:
        one = left.pop()
        if one not in found:
            found[one] = None
            left += [child for child in vars(one)["_modules"].values() if child is not None]
    return [*found]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    held = vars(module)
    return [x for part in ("_parameters", "_buffers") for x in held[part].values() if x is not None]


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run with a module's forward or backward. True where this version of torch does not tell: the module is then
    called, and none of its parameters is read past its call."""
    try:
        forward = module._forward_hooks or module._forward_pre_hooks
        return bool(forward or module._backward_hooks or module._backward_pre_hooks)
    except AttributeError:
        return True


def count_forward_hooks(module: nn.Module) -> int:
    """How many hooks run before a module's forward, or after it where these are more. Where this version of torch does not
    tell, a number that no module has."""
    try:
        return max(len(module._forward_pre_hooks), len(module._forward_hooks))
    except AttributeError:
        return MANY


def silence_uncaptured_steps(optimizer: torch.optim.Optimizer) -> None:
    """No warning of a capturable optimizer whose first steps are taken before a CUDA graph is captured. Another version of torch
    may warn once."""
    optimizer._warned_capturable_if_run_uncaptured = True
