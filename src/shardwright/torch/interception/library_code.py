"""PyTorch's own Python code in steps over several ranks: a table of what runs otherwise, laid for a batch.

======================  ===================================================================================
``Function.apply``      A custom function between units is one operation: function modes see the operations
                        in its forward alone, and nothing of its backward.
``ScriptFunction``      So is a scripted function, into which fake tensors cannot pass.
``autograd.backward``   goes to the active handler: see `backward_calls`.
``get_rng_state``       of `torch.utils.checkpoint` gives the state of the next draw: a unit in it gets its
                        own only when it is called.
``TransformerEncoder``  has zeros at padded places between units, as its fast path leaves them in a plain
                        evaluation, which no function mode may see.
``Distribution``        looks at no values between units, which one rank alone has, unless it is told to.
``inference_mode``      is ``no_grad``: its tensors count no changes in place, and it belongs to the thread,
                        while a step function may be suspended midway.
======================  ===================================================================================
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardwright.errors import UsageError
from shardwright.torch._private.modules import BackwardHookFunction
from shardwright.torch._private.tensors import FakeTensor, UnsupportedOperatorException
from shardwright.torch.interception.backward_calls import backward_intercepted, tensor_backward_intercepted
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves

# Their backward calls collectives, too.
_WITH_MESSAGES = ("torch.distributed.nn.functional", "torch.nn.modules._functions")


def _apply(original: Any) -> Any:
    """`apply` of every custom function."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = MethodType(original.__func__, cls)
        handler = active_handler()
        if handler is not None and cls is CheckpointFunction:
            # Units called inside would run without gradients: the other kind gives the same.
            run, preserve, *rest = args
            return checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
        if handler is not None and cls is BackwardHookFunction:
            raise UsageError(
                f"{user_line()}: this calls a module that has a backward hook (register_full_backward_hook "
                "or register_full_backward_pre_hook), and whose parts are placed one by one: no rank would "
                "have all the gradients that the hook is given. Register it on modules inside that are "
                "placed whole (`shardwright plan` lists them as units), or register hooks on tensors: "
                "y.register_hook(...)."
            )
        if handler is None or (cls.__module__.startswith("torch.") and cls.__module__ not in _WITH_MESSAGES):
            return function(*args, **kwargs)
        with plain_torch():
            return handler.operation(function, args, kwargs)

    return classmethod(apply)


class _InsideUnits:
    """The default of `Distribution`, but false between units."""

    def __init__(self, default: bool):
        self._default = default

    def __get__(self, instance: Any, owner: type) -> bool:
        return self._default and active_handler() is None


def _padded(plain: Any) -> Any:
    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        if (
            active_handler() is None
            or mask is not None
            or src_key_padding_mask is None
            or not _may_pack(self, src)
        ):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        output = src
        for layer in self.layers:
            output = layer(output, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
        is_padding = src_key_padding_mask
        if is_padding.dtype != torch.bool:  # numbers that are added to the scores
            is_padding = is_padding != 0
        if getattr(self, "mask_check", True):  # padding elsewhere keeps PyTorch from packing
            is_padding = is_padding & (is_padding[:, 1:] >= is_padding[:, :-1]).all()
        output = output.masked_fill(is_padding.unsqueeze(-1), 0.0)
        return output if self.norm is None else self.norm(output)

    return forward


def _may_pack(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether a plain call makes a nested tensor if the mask allows it (in PyTorch 2.11 to 2.13)."""
    first: Any = encoder.layers[0]
    trains = src.requires_grad or any(p.requires_grad for p in first.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
        and not (trains and torch.is_grad_enabled())
    )


def _enter(self: Any) -> None:
    self._grad_enabled_before = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode)


def _leave(self: Any, *exc_info: object) -> None:
    torch.set_grad_enabled(self._grad_enabled_before)


def _saved_in_turn(original: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The state from which the code that `torch.utils.checkpoint` runs will draw."""

    def get_rng_state() -> Tensor:
        handler: Any = active_handler()
        is_checkpoint = sys._getframe(1).f_globals.get("__name__") == "torch.utils.checkpoint"
        if is_checkpoint and hasattr(handler, "set_next_generators"):
            handler.set_next_generators()
        return original()

    return get_rng_state


def _called(original: Any) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not handler.intercepts:
            return original(function, *args, **kwargs)
        with plain_torch():
            return handler.operation(_Scripted(function), args, kwargs)

    return call


@dataclass(frozen=True, slots=True)
class _Scripted:
    """A scripted function as an operation: equal for all calls of one function."""

    function: Any

    @property
    def __name__(self) -> str:
        return str(self.function.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(item, FakeTensor) for item in leaves((args, kwargs))):
            failure: Any = UnsupportedOperatorException  # tells a trace that it needs random data
            raise failure("TorchScript")
        return self.function(*args, **kwargs)


# ---- the table


class _Patch:
    """An entry of a class or module that is another in steps."""

    def __init__(self, holder: Any, name: str, make: Callable[[Any], Any]):
        self._holder, self._name, self._make = holder, name, make
        self._usual = self._own = None

    def lay(self) -> Callable[[], None] | None:
        """Puts it in its place, and gives what undoes it; None where it is there."""
        usual = vars(self._holder)[self._name]
        if usual is self._own:
            return None
        if usual is not self._usual:
            self._usual, self._own = usual, self._make(usual)
        setattr(self._holder, self._name, self._own)
        return partial(setattr, self._holder, self._name, usual)


_BACKWARD = _Patch(torch.autograd, "backward", backward_intercepted)
_OF_TENSORS = _Patch(Tensor, "backward", tensor_backward_intercepted)  # function modes see it over stages
_PATCHES = (
    _BACKWARD,
    _Patch(torch.autograd.Function, "apply", _apply),
    _Patch(torch.jit.ScriptFunction, "__call__", _called),
    _Patch(torch, "get_rng_state", _saved_in_turn),
    _Patch(nn.TransformerEncoder, "forward", _padded),
    _Patch(Distribution, "_validate_args", _InsideUnits),
    _Patch(torch.inference_mode, "__enter__", lambda _: _enter),
    _Patch(torch.inference_mode, "__exit__", lambda _: _leave),
)


@contextmanager
def patched_for_stages() -> Iterator[None]:
    """Has the table in force, and leaves inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), _laid(_PATCHES):
            yield
    else:
        with _laid(_PATCHES):
            yield


def patched_backward() -> AbstractContextManager[None]:
    """Has what a rank that holds the whole model needs in force."""
    return _laid((_BACKWARD, _OF_TENSORS))


@contextmanager
def _laid(patches: Iterable[_Patch]) -> Iterator[None]:
    undo = [patch.lay() for patch in patches]
    try:
        yield
    finally:
        for each in undo:
            if each is not None:
                each()
