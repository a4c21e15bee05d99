"""`model_creation`: what a script says of the models that it creates; attention of modules of PyTorch.

`nn.MultiheadAttention` runs PyTorch's own code, on copies of two of its functions that find our attention
where they look for PyTorch's. In the forward of another module a function mode takes the calls.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import ref

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode

from shardwright.after_import import after_import
from shardwright.errors import UsageError
from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.hugging_face import (
    PLAIN,
    Choices,
    implementation_of,
    is_plain,
    looks_up_attention,
    makes_masks,
    mark_left_alone,
    mark_routed,
    route_lookups,
    route_masks,
    route_method,
    route_scores,
    say_plain,
    scores_of,
)
from shardwright.torch.attention.kernels import Attention, Choice, attend
from shardwright.torch.pytorch.modules import CreationWatch

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


@contextmanager
def model_creation(*, flash_attention: bool | None = True) -> Iterator[None]:
    """Has the models that are created inside attend by kernels that keep no scores.

    The memory that a layer keeps for its backward then grows linearly with the length of the sequence, not
    with its square. Modules, names and states of the model are those of an ordinary one, and so are its
    results, but for rounding; dropout of attention draws other numbers, from the same distribution. The
    innermost setting wins.

    Args:
        flash_attention: False creates models with plain attention, which keeps all scores. None leaves them
            as they are elsewhere. Always, a model with an ``attn_implementation`` of the script keeps it.

    Raises:
        UsageError: `flash_attention` is something else.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> with sw.model_creation(flash_attention=True):
        ...     model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    """
    if flash_attention is not None and not isinstance(flash_attention, bool):
        raise UsageError(f"flash_attention is {flash_attention!r}, but it is True, False or None.")
    creation = None if flash_attention is None else _Creation(fused=flash_attention)
    with _CREATIONS.inside(creation):
        yield
    if creation is not None:
        creation.end()


def route_attention(model: nn.Module, *, flash_attention: bool) -> None:
    """Does to a model what `model_creation` would have done."""
    creation = _Creation(fused=flash_attention)
    for module in model.modules():
        creation.route(module)


class _Creation:
    """The models of one ``with`` statement."""

    def __init__(self, *, fused: bool):
        self._fused = fused
        self._created: list[ref[nn.Module]] = []

    def module_begins(self, module: nn.Module) -> None:
        """The constructor of a module has begun."""
        # These at once, because `nn.TransformerEncoder` copies the layer that it is given.
        if not self._settle_plain(module):
            self._created.append(ref(module))  # until the model has decided on an implementation

    def end(self) -> None:
        for reference in self._created:
            module = reference()
            if module is not None:
                self._settle_known(module)

    def route(self, module: nn.Module) -> None:
        if not self._settle_plain(module):
            self._settle_known(module)

    def _settle_plain(self, module: nn.Module) -> bool:
        """Routes a module by its class alone; whether it is of such a class."""
        kind: Any = type(module)
        if is_multihead(kind):
            route_multihead()
        elif calls_attention(kind):
            route_calls(kind)
        else:
            return False
        mark_routed(module, fused=self._fused)
        return True

    def _settle_known(self, module: nn.Module) -> None:
        """Routes a module of transformers by its config."""
        if makes_masks(module):
            self._settle_masks(module)
        elif scores_of(module):
            self._settle_scores(module)
        elif looks_up_attention(module):
            self._settle_lookup(module)

    def _settle_masks(self, model: Any) -> None:
        if self._fused and _Undecided.knows(model.config):
            mark_routed(model)
            route_masks(model)

    def _settle_scores(self, module: Any) -> None:
        if not self._fused:
            mark_left_alone(module, PLAIN)
        elif _Undecided.knows(module.config):
            mark_routed(module)
            route_scores(module)
        else:
            mark_left_alone(module, _as_chosen(module))

    def _settle_lookup(self, module: Any) -> None:
        if implementation_of(module) == "sdpa":
            mark_routed(module, fused=self._fused)
            route_lookups(module)
        elif implementation_of(module) is not None:
            mark_left_alone(module, _as_chosen(module))


def _as_chosen(module: nn.Module) -> Choice:
    name = str(implementation_of(module))
    is_chosen = not _Undecided.knows(module.config)
    return Choice(name, f"attn_implementation={name!r}" if is_chosen else "transformers knows no other")


class _Undecided:
    """Configs for which a script has chosen no implementation, before their first model did."""

    _of: dict[int, ref[Any]] = {}  # noqa: RUF012

    @classmethod
    def note(cls, config: Any) -> None:
        """The constructor of a model is about to choose."""
        if getattr(config, "_attn_implementation", "") is None:
            key = id(config)
            cls._of[key] = ref(config, lambda _: cls._of.pop(key, None))

    @classmethod
    def knows(cls, config: Any) -> bool:
        reference = cls._of.get(id(config))
        return reference is not None and reference() is config


def _module_begins(module: nn.Module, creation: _Creation | None) -> None:
    if creation is not None:
        creation.module_begins(module)


_CREATIONS: CreationWatch[_Creation | None] = CreationWatch(_module_begins)


def _watch_models(transformers: Any) -> None:
    """Has all transformers models, wherever they are created, say whether something was chosen for them.

    Their constructors write their own choice into the config, where it looks like the script's.
    """
    owner = transformers.PreTrainedModel
    original: Callable[..., None] = owner.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        _Undecided.note(config)
        original(self, config, *args, **kwargs)

    owner.__init__ = __init__


after_import("transformers.modeling_utils", _watch_models)
