"""Splits the backward of linear layers and convolutions: input gradients now, weight gradients later.

A zero-bubble schedule sends the gradient of a stage's input as early as it can (``I``) and computes the
weight gradients (``W``) while it would otherwise wait. Autograd does both at once, so the modules listed here
have a backward of their own. In ``I`` it returns the input's gradient and leaves a closure for the weight's,
which bypasses autograd. In every other backward it gives both to autograd as usual::

    F  y = linear(x)                   a whole backward (B)         grad_x, grad_weight, grad_bias
    I  grad_x, closure   ◀── y         torch.autograd.grad          the same; also create_graph
    W  closure()                       a backward inside of I       the same
                                       somebody listens (hooks)     the same

Everything else (norms, embeddings, unusual modules) is computed in ``I``. That is correct; it only defers
less work.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private.modules import backward_in_progress, gradient_is_wanted
from shardwright.torch._private.tensors import FakeTensor, function_transforms_active
from shardwright.torch.interception.glue import active_handler
from shardwright.torch.parameters.parameter_kinds import gradient_dtype

Work = Callable[[], None]

# Fake tensors stand for plain ones where memory is counted; other subclasses have backwards of their own.
_PLAIN = (Tensor, FakeTensor)


class _PutOff:
    """The way in which the process computes the gradients of weights just now.

    Attributes:
        allowed: the backward of what runs may be split later.
        work: where closures of the running ``I`` go; None while weights are computed at once.
        backward: autograd's number of that ``I``.
        listener: is told of gradients that are written past autograd.
        uses: counts the uses of each parameter in the microbatch.
    """

    allowed: bool = True
    work: list[Work] | None = None
    backward: int | None = None
    listener: Callable[[Tensor], None] | None = None
    uses: dict[int, int] | None = None


def notify_gradients(listener: Callable[[Tensor], None] | None) -> None:
    """Has a function called with every parameter whose gradient was written past autograd; None to stop."""
    _PutOff.listener = listener


def allow_split(allowed: bool) -> None:
    """Says whether the backward of what runs from now on may be split."""
    _PutOff.allowed = allowed


def count_uses(uses: dict[int, int] | None) -> None:
    """Counts in this dictionary how often each parameter is used from now on: by id of the parameter."""
    _PutOff.uses = uses


@contextmanager
def put_off_weights(roots: Iterable[Any]) -> Iterator[list[Work]]:
    """Collects the weight gradients of the backward that runs inside; call each to have it computed."""

    def begins(_: Any) -> None:
        if _PutOff.backward is None:
            _PutOff.backward = backward_in_progress()

    work: list[Work] = []
    before = _PutOff.work, _PutOff.backward
    _PutOff.work, _PutOff.backward = work, None
    handles = [root.register_prehook(begins) for root in roots if root is not None]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()
        _PutOff.work, _PutOff.backward = before


def _put_off(weight: Tensor, bias: Tensor | None) -> list[Work] | None:
    """The list for these gradients, if they may be written past autograd; None if they may not."""
    if _PutOff.work is None or _PutOff.backward != backward_in_progress() or torch.is_grad_enabled():
        return None
    return None if _has_listeners(weight) or (bias is not None and _has_listeners(bias)) else _PutOff.work


def _has_listeners(parameter: Tensor) -> bool:
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return any(hooks)


def _count_use(weight: Tensor) -> dict[int, int] | None:
    uses = _PutOff.uses
    if uses is not None:
        uses[id(weight)] = uses.get(id(weight), 0) + 1
    return uses


class _SplitLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` whose weight gradient can be put off.

    Shapes: x (*, I), weight (O, I), or (I, O) where `transposed`; bias (O,); result (*, O).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        # Parameters are kept as they are: what recomputation gives back for a saved tensor is a copy.
        ctx.weight, ctx.bias = weight, bias
        ctx.transposed = transposed
        ctx.uses = _count_use(weight)
        ctx.casts = False
        if (dtype := _autocast_dtype(x)) is not None:
            ctx.casts = x.dtype is not dtype
            # By hand: autocast would keep a cast that is made here, where nothing is recorded.
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x)
        with nullcontext() if dtype is None else torch.autocast(x.device.type, enabled=False):
            result = F.linear(x, weight.t() if transposed else weight, bias)
        # A view made in here must not be changed in place, as an activation behind it may well do.
        return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        if ctx.casts and torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient goes through a linear layer that autocast casts for, and whose "
                "backward a zero-bubble schedule splits: set pipeline to 1f1b."
            )
        grad_x = None
        if ctx.needs_input_grad[0]:
            own = weight.to(grad.dtype)
            grad_x = grad @ (own.t() if ctx.transposed else own)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        x_NI = x.reshape(-1, x.shape[-1])
        left_N, right_N = (x_NI, grad_NO) if ctx.transposed else (grad_NO, x_NI)
        later = _put_off(weight, bias)
        if later is None:
            grad_weight = left_N.t() @ right_N if gradient_is_wanted(ctx, 1) else None
            grad_bias = grad_NO.sum(0) if gradient_is_wanted(ctx, 2) else None
            return grad_x, grad_weight, grad_bias, None
        uses = ctx.uses
        # As they were in the forward: the step function may change `requires_grad` behind it.
        wanted = [gradient_is_wanted(ctx, 1), gradient_is_wanted(ctx, 2)]

        def work() -> None:
            with torch.no_grad():
                if wanted[0]:
                    _accumulate_product(weight, left_N.t(), right_N)
                if bias is not None and wanted[1]:
                    _accumulate(bias, grad_NO.sum(0))
            _notify(uses, weight, bias)

        later.append(work)
        return grad_x, None, None, None


class _SplitConvolution(torch.autograd.Function):
    """A convolution whose weight gradient can be put off.

    Shapes: x (N, C, *), weight (O, C / groups, *), bias (O,), result (N, O, *).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.how = weight, bias, how
        ctx.uses = _count_use(weight)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        (x,) = ctx.saved_tensors
        weight, bias, how, uses = ctx.weight, ctx.bias, ctx.how, ctx.uses

        def gradients_of(wanted: list[bool]) -> list[Tensor | None]:
            sizes = None if bias is None else bias.shape
            found: list[Tensor | None]
            found = torch.ops.aten.convolution_backward(grad, x, weight, sizes, *how, wanted)
            return found

        later = _put_off(weight, bias)
        if later is None:
            wanted = [ctx.needs_input_grad[0], gradient_is_wanted(ctx, 1), gradient_is_wanted(ctx, 2)]
            return (*gradients_of(wanted), None)

        wanted = [False, gradient_is_wanted(ctx, 1), gradient_is_wanted(ctx, 2)]

        def work() -> None:
            with torch.no_grad():
                found = gradients_of(wanted) if any(wanted) else [None] * 3
                for parameter, gradient, wants in zip((weight, bias), found[1:], wanted[1:], strict=True):
                    # Some kernels give both, whatever was wanted.
                    if gradient is not None and wants:
                        _accumulate(parameter, gradient)
            _notify(uses, weight, bias)

        later.append(work)
        grad_x = gradients_of([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


def _accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    if parameter.grad is None or parameter.grad.dtype is not left.dtype:
        _accumulate(parameter, left @ right)
    else:
        # One pass over the gradient: autograd makes the product first and adds it in a second one.
        parameter.grad.addmm_(left, right)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        gradient = gradient.to(gradient_dtype(parameter))
        # It lies in memory as the parameter does: autograd sees to that, too, and optimizers are faster.
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _notify(uses: dict[int, int] | None, weight: Tensor, bias: Tensor | None) -> None:
    if uses is None:
        return
    uses[id(weight)] -= 1
    if uses[id(weight)] == 0 and _PutOff.listener is not None:
        _PutOff.listener(weight)
        if bias is not None:
            _PutOff.listener(bias)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type to which autocast casts an argument; None where it does not."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def _is_plain(parameter: Any) -> bool:
    """Whether it is an ordinary parameter: not a subclass with a backward of its own, not computed."""
    return parameter is None or (type(parameter) in (nn.Parameter, FakeTensor) and parameter.is_leaf)


class _SplitForward:
    """Replaces the forward of one module."""

    def __init__(
        self, module: nn.Module, function: type[torch.autograd.Function], how: Any, dim: int | None = None
    ):
        self._module = module
        self._function: Any = function
        self._how = how
        self._dim = dim

    def __call__(self, x: Tensor) -> Tensor:
        # Code between units may call a module that is inside one: that is an operation like others.
        # A compiled one has its whole backward in one piece.
        if torch.compiler.is_dynamo_compiling() or not _PutOff.allowed or active_handler() is not None:
            return type(self._module).forward(self._module, x)  # type: ignore[no-any-return]
        weight, bias = self._module.weight, self._module.bias
        # Under autocast a linear layer casts what it takes; a convolution is left to autograd.
        casts = _autocast_dtype(x) is not None and self._function is _SplitLinear
        fits = casts or x.dtype == weight.dtype
        plain = type(x) in _PLAIN and fits and _is_plain(weight) and _is_plain(bias)
        if (
            not plain
            or x.is_complex()  # gradients would have to be conjugated
            or not torch.is_grad_enabled()
            or (torch.is_autocast_enabled(x.device.type) and not casts)
            or function_transforms_active()
            or self._dim not in (None, x.dim())
        ):
            return type(self._module).forward(self._module, x)  # type: ignore[no-any-return]
        result: Tensor = self._function.apply(x, weight, bias, self._how)
        return result


_CONVOLUTIONS = {nn.Conv1d.forward: 3, nn.Conv2d.forward: 4, nn.Conv3d.forward: 5}


def _split_forward(module: nn.Module) -> _SplitForward | None:
    """The replacement of a module's forward; None to leave it as it is."""
    forward: Any = type(module).forward
    if forward is nn.Linear.forward:
        return _SplitForward(module, _SplitLinear, False)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        # GPT-2's linear layer, with the weight stored as (in, out).
        return _SplitForward(module, _SplitLinear, True)
    if forward in _CONVOLUTIONS:
        conv: Any = module
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return None
        how = (conv.stride, conv.padding, conv.dilation, False, [0] * len(conv.stride), conv.groups)
        return _SplitForward(module, _SplitConvolution, how, _CONVOLUTIONS[forward])
    return None


def split_modules(module: nn.Module) -> list[nn.Module]:
    """Makes every linear module and convolution inside able to put its weight gradient off; returns them."""
    done = []
    for sub in module.modules():
        # A weight that is computed on access (parametrizations) must be asked for once a forward.
        if "forward" in sub.__dict__ or sub._parameters.get("weight") is None:
            continue
        replacement = _split_forward(sub)
        if replacement is not None:
            sub.__dict__["forward"] = replacement
            done.append(sub)
    return done


def unsplit(modules: list[nn.Module]) -> None:
    """Takes back `split_modules`."""
    for module in modules:
        if isinstance(module.__dict__.get("forward"), _SplitForward):
            del module.__dict__["forward"]
