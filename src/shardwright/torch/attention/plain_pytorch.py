"""Routes the attention of modules of PyTorch, and of modules that call PyTorch's attention themselves.

`nn.MultiheadAttention` runs PyTorch's own code, on copies of two of its functions that find our attention
where they look for PyTorch's. In the forward of another module a function mode takes the calls.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode

from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.kernels import Attention, Choice, attend
from shardwright.torch.attention.marks import PLAIN, Choices, is_plain, route_method, say_plain

_CALLED = "scaled_dot_product_attention"


@cache
def is_multihead(kind: type) -> bool:
    """Whether modules of a class run the forward of PyTorch's `nn.MultiheadAttention`."""
    owner = next((each for each in kind.__mro__ if "forward" in vars(each)), None)
    return owner is nn.MultiheadAttention


def route_multihead() -> None:
    """Has marked modules of this kind attend without a table of scores."""
    route_method(nn.MultiheadAttention, "forward", _multihead)


def _multihead(
    original: Callable[..., Any],
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = (query, key, value, key_padding_mask, need_weights, *args)
    if need_weights:
        if not is_plain(module):
            say_plain(module)
        return original(module, *given, **kwargs)

    if getattr(original, "__globals__", None) is not vars(activation):  # another library has replaced it
        Choices.note(module, Choice("PyTorch", "nn.MultiheadAttention.forward is not PyTorch's"))
        return original(module, *given, **kwargs)

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return _attend(module, *args, **kwargs)

    multi_head = _with_names(F.multi_head_attention_forward, scaled_dot_product_attention=attention)
    # Function modes call what this name stands for.
    multi_head.__globals__["multi_head_attention_forward"] = multi_head
    functional = SimpleNamespace(**{**_names(F), "multi_head_attention_forward": multi_head})
    return _with_names(original, F=functional)(module, *given, **kwargs)


@cache
def _names(owner: Any) -> dict[str, Any]:
    return dict(vars(owner))


def _with_names(function: Any, **names: Any) -> FunctionType:
    """A copy of a function, to which some global names mean something else."""
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@cache
def calls_attention(kind: type) -> bool:
    """Whether a method of a class of modules names PyTorch's attention."""
    if issubclass(kind, nn.MultiheadAttention):
        return False
    own = (each for each in kind.__mro__ if each not in nn.Module.__mro__)
    methods = (inspect.unwrap(item) for each in own for item in vars(each).values() if callable(item))
    codes = (getattr(method, "__code__", None) for method in methods)
    return any(code is not None and _CALLED in code.co_names for code in codes)


def route_calls(kind: type[nn.Module]) -> None:
    """Has marked modules of a class attend without a table of scores."""
    route_method(kind, "forward", _with_calls_routed)


def _with_calls_routed(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _CallsRouted(module):
        return original(module, *args, **kwargs)


class _CallsRouted(TorchFunctionMode):
    """Takes the calls of PyTorch's attention."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].dim() == 4:
            return _attend(self._module, *args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`."""
    attention = Attention(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        seen=Seen(causal=is_causal),
        dropout=dropout_p,
    )
    result, choice = attend(
        query, key, value, attn_mask, attention, wanted=PLAIN if is_plain(module) else None
    )
    Choices.note(module, choice)
    return result
