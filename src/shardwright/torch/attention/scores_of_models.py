"""Routes the attention of transformers models that compute their scores themselves: GPT-J and GPT-Neo.

Their attention modules have a method ``_attn``, which is replaced. Their models make a mask of numbers for
it, also where nothing but the order of positions hides a key; for marked models that mask is left out.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.hugging_face import additive, call_if_asked
from shardwright.torch.attention.kernels import Attention, attend
from shardwright.torch.attention.marks import PLAIN, Choices, is_plain, route_method
from shardwright.torch.attention.weights_wanted import say_plain, weights_are_wanted

__all__ = ["makes_masks", "route_masks", "route_scores", "scores_of"]

_METHOD = "_attn"
_MAKER = "create_causal_mask"

# Set while a marked model runs. Each microbatch is a greenlet, which has context variables of its own.
_WITHOUT_NUMBERS: ContextVar[bool] = ContextVar("masks without numbers", default=False)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How a class computes attention.

    Attributes:
        seen: which of so many keys so many queries see by position, given there is a mask.
    """

    scale: Callable[[Any], float]
    seen: Callable[[Any, Tensor, Tensor, bool], Seen]


def _by_mask(module: Any, query: Tensor, key: Tensor, masked: bool) -> Seen:
    """The mask says it; where there is none, transformers means the order of positions."""
    return Seen(causal=not masked and query.shape[2] > 1)


def _by_itself(module: Any, query: Tensor, key: Tensor, masked: bool) -> Seen:
    """The module says it, and the mask is added: positions count from the last key."""
    window = module.config.window_size if module.attention_type == "local" else None
    beyond = torch.finfo(torch.float32).min if masked else float("-inf")
    return Seen(causal=True, shift=key.shape[2] - query.shape[2], window=window, score_beyond=beyond)


_SCORES = {
    "GPTJAttention": _Scores(lambda module: 1.0 / module.scale_attn, _by_mask),
    "GPTNeoSelfAttention": _Scores(lambda module: 1.0, _by_itself),
}

_MODELS = frozenset({"GPTJModel", "GPTNeoModel"})


def scores_of(module: nn.Module) -> bool:
    """Whether a module computes scores in a way that we know."""
    return _known(module, _SCORES) is not None and _is_of_transformers(_owner(module, _METHOD))


def makes_masks(module: nn.Module) -> bool:
    """Whether a module is a model around such modules."""
    return _known(module, dict.fromkeys(_MODELS, True)) is not None


def _owner(module: nn.Module, method: str) -> type:
    return next(kind for kind in type(module).__mro__ if method in vars(kind))


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _known(module: nn.Module, kinds: dict[str, Any]) -> Any:
    kind = next((kind for kind in type(module).__mro__ if _is_of_transformers(kind)), None)
    return None if kind is None else kinds.get(kind.__name__)


def route_scores(module: nn.Module) -> None:
    """Has marked modules of this class attend without a table of scores."""
    route_method(type(module), _METHOD, _attend)
    route_method(type(module), "forward", call_if_asked)


def route_masks(module: nn.Module) -> None:
    """Has marked models of this class leave out masks of numbers."""
    route_method(type(module), "forward", _call_without_numbers)
    owner = sys.modules[type(module).__module__]
    maker = getattr(owner, _MAKER, None)
    if maker is not None and not hasattr(maker, "_shardwright_replaces"):
        setattr(owner, _MAKER, _without_numbers(maker))


def _call_without_numbers(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    token = _WITHOUT_NUMBERS.set(True)
    try:
        return original(module, *args, **kwargs)
    finally:
        _WITHOUT_NUMBERS.reset(token)


def _without_numbers(maker: Callable[..., Any]) -> Callable[..., Any]:
    def create_causal_mask(*args: Any, config: Any, **kwargs: Any) -> Any:
        if _WITHOUT_NUMBERS.get():
            config = copy(config)  # the model's own still says what it was created with
            config._attn_implementation_internal = "sdpa"
        return maker(*args, config=config, **kwargs)

    vars(create_causal_mask)["_shardwright_replaces"] = maker
    return create_causal_mask


def _attend(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if is_plain(module):
        Choices.note(module, PLAIN)
        return original(module, query, key, value, attention_mask)  # type: ignore[no-any-return]
    scores: _Scores = _known(module, _SCORES)
    seen = scores.seen(module, query, key, attention_mask is not None)
    if weights_are_wanted():
        say_plain(module)
        mask = additive(attention_mask, query, key, causal=seen.causal and scores.seen is _by_mask)
        return original(module, query, key, value, mask)  # type: ignore[no-any-return]
    attention = Attention(
        scale=scores.scale(module),
        seen=seen,
        dropout=module.attn_dropout.p if module.training else 0.0,
        hidden_score=torch.finfo(query.dtype).min,
    )
    result, choice = attend(query, key, value, attention_mask, attention)
    Choices.note(module, choice)
    return result, None
