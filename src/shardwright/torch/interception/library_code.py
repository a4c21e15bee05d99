"""PyTorch's own Python code between units: what runs whole, without checks, or as in evaluation.

PyTorch does not show calls of a `torch.autograd.Function` to function modes. Unintercepted, the operations
inside its forward would pass for the step function's own, and a tensor from inside would be sent without the
function's backward.

The checks of `torch.distributions` read values into Python (``if not valid.all(): raise``), which only one
rank has. They change nothing else. They still run inside units, and for a distribution with
``validate_args=True``.

Without gradients, PyTorch's encoder takes a fast path when it is given a padding mask: it packs the sequences
into a nested tensor, which leaves zeros at the padded places. It does not while torch functions are
intercepted, as between the units of a step function: the padded places then hold what the layers computed. A
reader of them, such as a mean over the sequence, would differ from a plain loop.

`torch.inference_mode` is taken as `torch.no_grad`: inference tensors have no version counters, which a trace
needs to see changes in place. The mode also belongs to the thread, while a step function may be suspended
midway. Results are the same.

`checkpoint` saves the state of the generators before it runs the code, and restores it to recompute. But a
unit inside gets its own state only when it is called, so the saved state would be that of whatever ran before
on this rank. So the state of the next draw is set before `checkpoint` saves.

PyTorch does not show calls of TorchScript functions and modules (`torch.jit.script`, `torch.jit.trace`) to
function modes, and fake tensors cannot pass through them. A function's call between units is one operation. A
scripted module is replaced in the model by a Python module that owns its parameters and buffers, so they are
released, sharded and replaced like any others.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardwright.errors import UsageError
from shardwright.torch._private import BackwardHookFunction, FakeTensor, UnsupportedOperatorException
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import leaves

# Their backward calls collectives, too.
_WITH_MESSAGES = ("torch.distributed.nn.functional", "torch.nn.modules._functions")


@contextmanager
def custom_functions_intercepted() -> Iterator[None]:
    """Has `apply` of every custom function go to the active handler."""
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

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

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original


class _InsideUnits:
    """The default of `Distribution`, but false between units."""

    def __init__(self, default: bool):
        self._default = default

    def __get__(self, instance: Any, owner: type) -> bool:
        return self._default and active_handler() is None


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Distributions that are used between units do not look at values, unless they are told to."""
    kind: Any = Distribution
    before = kind.__dict__["_validate_args"]
    kind._validate_args = _InsideUnits(before)
    try:
        yield
    finally:
        kind._validate_args = before


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Encoders that are called between units give what the nested way gives."""
    kind: Any = nn.TransformerEncoder
    plain = kind.forward

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

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = plain


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


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Leaves inference mode, and has code inside enter `torch.no_grad` in its place."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), _replaced():
            yield
    else:
        with _replaced():
            yield


@contextmanager
def _replaced() -> Iterator[None]:
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    kind.__enter__, kind.__exit__ = _enter, _leave
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


def _enter(self: Any) -> None:
    self._grad_enabled_before = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode)


def _leave(self: Any, *exc_info: object) -> None:
    torch.set_grad_enabled(self._grad_enabled_before)


@contextmanager
def generators_saved_in_turn() -> Iterator[None]:
    """Has `torch.utils.checkpoint` save the state from which the code that it runs will draw."""
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        handler: Any = active_handler()
        is_checkpoint = sys._getframe(1).f_globals.get("__name__") == "torch.utils.checkpoint"
        if is_checkpoint and hasattr(handler, "set_next_generators"):
            handler.set_next_generators()
        return original()

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original


@contextmanager
def scripted_functions_intercepted() -> Iterator[None]:
    """Has calls of scripted functions between units go to the active handler."""
    kind: Any = torch.jit.ScriptFunction
    original = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not handler.intercepts:
            return original(function, *args, **kwargs)
        with plain_torch():
            return handler.operation(_Scripted(function), args, kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


@dataclass(frozen=True, slots=True)
class _Scripted:
    """A scripted function as an operation: equal for all calls of one function."""

    function: Any

    @property
    def __name__(self) -> str:
        return str(self.function.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_fakes((args, kwargs))
        return self.function(*args, **kwargs)


def _refuse_fakes(arguments: Any) -> None:
    """Raises what tells a trace that it needs random data."""
    if any(isinstance(item, FakeTensor) for item in leaves(arguments)):
        failure: Any = UnsupportedOperatorException
        raise failure("TorchScript")


class _Part(nn.Module):
    """The parameters and buffers of a scripted module, under their names."""

    def __init__(self, scripted: Any, parts: dict[int, "_Part"]):
        super().__init__()
        parts[id(scripted)] = self
        for name, parameter in scripted._parameters.items():
            known = parameter is None or isinstance(parameter, nn.Parameter)
            # Those of a loaded module are no parameters to Python.
            own = parameter if known else nn.Parameter(parameter.detach(), parameter.requires_grad)
            self.register_parameter(name, own)
        for name, buffer in scripted._buffers.items():
            self.register_buffer(name, buffer)
        self.training = scripted.training
        for name, inner in scripted._modules.items():
            self._modules[name] = parts.get(id(inner)) or _Part(inner, parts)


class ScriptedModule(_Part):
    """Replaces a TorchScript module in a model, and calls it.

    The scripted module itself has its tensors only while it is called. Else there would be two owners, of
    which one would never learn that a tensor has been released or replaced.
    """

    _scripted: Any

    def __init__(self, scripted: Any):
        super().__init__(scripted, {})
        vars(self)["_scripted"] = scripted
        self._take_back()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the scripted module; between units, that is one operation."""
        handler = active_handler()
        if handler is None or not handler.intercepts:
            return self.call(*args, **kwargs)
        with plain_torch():
            return handler.operation(self.call, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Lends the scripted module its tensors for a call."""
        _refuse_fakes((args, kwargs, list(self.parameters()), list(self.buffers())))
        for part, scripted in self._pairs():
            if scripted.training != part.training:
                scripted.training = part.training
            for name, tensor in _tensors(part):
                scripted._c.setattr(name, tensor)
        try:
            return self._scripted(*args, **kwargs)
        finally:
            self._take_back()

    def _pairs(self) -> Iterator[tuple[nn.Module, Any]]:
        return zip(self.modules(), self._scripted.modules(), strict=True)

    def _take_back(self) -> None:
        nothing = torch.empty(0)
        for part, scripted in self._pairs():
            for name, tensor in _tensors(part):
                now = scripted._c.getattr(name)
                if now is not tensor and name in part._buffers:
                    part._buffers[name] = now  # its code has made another one
                scripted._c.setattr(name, nothing)


def _tensors(part: nn.Module) -> list[tuple[str, Tensor]]:
    every = [*part._parameters.items(), *part._buffers.items()]
    return [(name, tensor) for name, tensor in every if tensor is not None]


def without_scripted(module: nn.Module) -> nn.Module:
    """Replaces each scripted module by a `ScriptedModule`, and returns the resulting model."""
    known: dict[int, nn.Module] = {}

    def replaced(inner: nn.Module) -> nn.Module:
        if id(inner) not in known:
            known[id(inner)] = ScriptedModule(inner)
        return known[id(inner)]

    if isinstance(module, torch.jit.ScriptModule):
        return replaced(module)
    for outer in list(module.modules()):
        if not isinstance(outer, torch.jit.ScriptModule):
            for name, inner in outer._modules.items():
                if isinstance(inner, torch.jit.ScriptModule):
                    outer._modules[name] = replaced(inner)
    return module
