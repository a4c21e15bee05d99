"""Routes the attention of transformers models.

Most of them look up a function by ``config._attn_implementation``, and those that nobody chose anything for
say ``sdpa``. That function is replaced by one that looks for the mark of the module which calls it. The
config stays as it is: what the model compares with it, and the masks that it makes by it, stay PyTorch's.

Shapes: B samples, H heads, G heads of keys, Q queries, K keys, D channels.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.kernels import Attention, attend
from shardwright.torch.attention.marks import PLAIN, Choices, is_plain, is_routed, route_method
from shardwright.torch.attention.weights_wanted import call_with_request, say_plain, weights_are_wanted

__all__ = ["additive", "implementation_of", "looks_up_attention", "route_lookups"]

_LOOKED_UP = "ALL_ATTENTION_FUNCTIONS"
_OF_PYTORCH = "sdpa"

# What the fused kernels have no place for; transformers' own function takes them.
_UNROUTED = ("softcap", "position_bias", "cache")


def looks_up_attention(module: nn.Module) -> bool:
    """Whether a module looks up how to compute its attention."""
    forward = inspect.unwrap(type(module).forward)
    return _LOOKED_UP in getattr(getattr(forward, "__code__", None), "co_names", ())


def implementation_of(module: nn.Module) -> str | None:
    """What a module, or a model, is to use: ``sdpa``, ``eager`` and so on; None for no choice yet."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name


def route_lookups(module: nn.Module) -> None:
    """Has modules of this class find our attention under the name of PyTorch's, if they are marked."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Its class has the functions; an instance of a model file may override some.
    registry = getattr(sys.modules[type(module).__module__], _LOOKED_UP, ALL_ATTENTION_FUNCTIONS)
    original = registry[_OF_PYTORCH]
    if not hasattr(original, "_shardwright_replaces"):
        registry[_OF_PYTORCH] = _routed(original)
    route_method(type(module), "forward", call_if_asked)


def call_if_asked(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a forward that may be asked for its weights."""
    if not kwargs.get("output_attentions"):
        return original(module, *args, **kwargs)
    return call_with_request(original, module, *args, **kwargs)


def _weights_are_captured() -> bool:
    """Whether the model takes down the weights, and so does not tell its attention modules to return them."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    captured = None if collector is None else collector.get()
    return captured is not None and any("attentions" in key for key in captured)


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    def sdpa_attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        if not is_routed(module) or any(kwargs.get(name) is not None for name in _UNROUTED):
            return original(module, query, key, value, attention_mask, **given)  # type: ignore[no-any-return]
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
        plain = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if plain is not None and (weights_are_wanted() or _weights_are_captured()):
            say_plain(module)
            mask = additive(attention_mask, query, key, causal=is_causal)
            given["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
            return plain(module, query, key, value, mask, **given)  # type: ignore[no-any-return]
        attention = Attention(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            seen=Seen(causal=is_causal),
            dropout=dropout,
            hidden_score=torch.finfo(query.dtype).min,
        )
        result, choice = attend(
            query, key, value, attention_mask, attention, wanted=PLAIN if is_plain(module) else None
        )
        Choices.note(module, choice)
        return result.transpose(1, 2).contiguous(), None

    vars(sdpa_attention_forward)["_shardwright_replaces"] = original
    return sdpa_attention_forward


def additive(mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> Tensor | None:
    """A mask as transformers' plain attention adds it to the scores."""
    if mask is None and causal:
        shape = (query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(query.dtype).min)
