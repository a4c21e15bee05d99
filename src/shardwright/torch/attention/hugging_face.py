"""Routes the attention of transformers models, and the marks on modules that are routed.

A class that computes attention gets one method replaced, once, by one that looks for the mark. Modules
without it run the original, so that models which are created elsewhere stay as they are.

Most of them look up a function by ``config._attn_implementation``, and those that nobody chose anything for
say ``sdpa``. That function is replaced by one that looks for the mark of the module which calls it. The
config stays as it is: what the model compares with it, and the masks that it makes by it, stay PyTorch's.

Shapes: B samples, H heads, G heads of keys, Q queries, K keys, D channels.

GPT-J and GPT-Neo compute scores in a method ``_attn``, which is replaced. These models make a mask of numbers
for it, also where nothing but the order of positions hides a key; for marked models that mask is left out.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.kernels import Attention, Choice, attend

# The table's word for attention that keeps all scores because the script wants it to.
PLAIN = Choice("plain", "flash_attention=False")

_MARK = "_shardwright_attention"
_FUSED = "fused"
_REPLACES = "_shardwright_replaces"


def mark_routed(module: nn.Module, *, fused: bool = True) -> None:
    """Has the attention of a module routed: to a kernel that keeps no scores, or to plain attention."""
    vars(module)[_MARK] = _FUSED if fused else astuple(PLAIN)


def mark_left_alone(module: nn.Module, choice: Choice) -> None:
    """Has a module compute its attention as it does, and the table say how and why."""
    # No class of ours, so that a pickled module needs no shardwright.
    vars(module)[_MARK] = astuple(choice)


def is_routed(module: nn.Module) -> bool:
    """Whether our functions compute a module's attention; not in compiled code, where PyTorch fuses."""
    return (vars(module).get(_MARK) == _FUSED or is_plain(module)) and not torch.compiler.is_compiling()


def is_plain(module: nn.Module) -> bool:
    return vars(module).get(_MARK) == astuple(PLAIN)


def left_alone(module: nn.Module) -> Choice | None:
    """How and why a module computes its attention as it does; None where nobody has said so."""
    mark = vars(module).get(_MARK)
    return Choice(*mark) if isinstance(mark, tuple) else None


def route_method(owner: Any, name: str, routed: Callable[..., Any]) -> None:
    """Replaces a method of a class, once."""
    original = getattr(owner, name)
    if _REPLACES in vars(original) and vars(original)[_REPLACES] is owner:
        return

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_routed(self):
            return original(self, *args, **kwargs)
        return routed(original, self, *args, **kwargs)

    vars(method)[_REPLACES] = owner
    setattr(owner, name, method)


class Choices:
    """What each module took last; not on the modules, whose attributes a trace puts back."""

    _of: WeakKeyDictionary[nn.Module, Choice] = WeakKeyDictionary()  # noqa: RUF012

    @classmethod
    def note(cls, module: nn.Module, choice: Choice) -> None:
        cls._of[module] = choice

    @classmethod
    def of(cls, module: nn.Module) -> Choice | None:
        return cls._of.get(module)


log = logging.getLogger(__name__)

# A context variable: each microbatch is a greenlet, which has values of its own.
_WANTED: ContextVar[bool] = ContextVar("attention weights are wanted", default=False)


class _Said:
    """Whether the script has been told."""

    already = False


def call_with_request(
    original: Callable[..., Any], module: nn.Module, *args: Any, output_attentions: Any = False, **kwargs: Any
) -> Any:
    """Calls the forward of an attention module, whose inner functions are not told what it was asked for."""
    token = _WANTED.set(bool(output_attentions))
    try:
        return original(module, *args, output_attentions=output_attentions, **kwargs)
    finally:
        _WANTED.reset(token)


def weights_are_wanted() -> bool:
    """Whether the attention module that runs was asked for its weights."""
    return _WANTED.get()


def say_plain(module: nn.Module) -> None:
    """Takes note of a module that computes plain attention, and tells the script once."""
    Choices.note(module, Choice("eager", "its weights are asked for"))
    if not _Said.already:
        _Said.already = True
        log.warning(
            "attention weights are asked for (output_attentions=True, or need_weights=True), and only plain "
            "attention has them: it is computed where they are, and keeps all scores."
        )


def kernels_of(model: nn.Module) -> dict[str, Choice]:
    """What the attention of each layer is computed by, by the name of its module."""
    found = {name: Choices.of(module) or left_alone(module) for name, module in model.named_modules()}
    return {name: choice for name, choice in found.items() if choice is not None}


def attention_table(model: nn.Module) -> str:
    """The table, with one line for layers that took the same; empty without such layers."""
    rows: dict[Choice, list[str]] = {}
    for name, choice in kernels_of(model).items():
        rows.setdefault(choice, []).append(name)
    if not rows:
        return ""
    cells = [(_names(names), choice.kernel, choice.why_not_fused) for choice, names in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    return "\n".join(
        f"  {layers:<{widths[0]}}  {kernel:<{widths[1]}}  {why}".rstrip() for layers, kernel, why in cells
    )


def _names(names: Iterable[str]) -> str:
    first, *rest = names
    return first if not rest else f"{first} ... {rest[-1]} ({1 + len(rest)})"


_LOOKED_UP = "ALL_ATTENTION_FUNCTIONS"
_OF_PYTORCH = "sdpa"

# What the fused kernels have no place for; transformers' own function takes them.
_UNROUTED = ("softcap", "position_bias", "cache")


def looks_up_attention(module: nn.Module) -> bool:
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
