"""`model_creation`: what a script says of the models of transformers that it creates.

Modules of PyTorch, and others that call its fused attention, have it already.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from shardwright.after_import import after_import
from shardwright.errors import UsageError
from shardwright.torch.attention.hugging_face import (
    PLAIN,
    implementation_of,
    looks_up_attention,
    makes_masks,
    mark_left_alone,
    mark_routed,
    route_lookups,
    route_masks,
    route_scores,
    scores_of,
)
from shardwright.torch.attention.kernels import Choice
from shardwright.torch.pytorch.modules import CreationWatch


@contextmanager
def model_creation(*, flash_attention: bool | None = True) -> Iterator[None]:
    """Has the models of transformers that are created inside attend by kernels that keep no scores.

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
        >>> import transformers, shardwright.torch as sw
        >>> with sw.model_creation(flash_attention=True):
        ...     model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2))
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
        """The constructor of a module has begun, and the model has decided on no implementation yet."""
        self._created.append(ref(module))

    def end(self) -> None:
        for reference in self._created:
            module = reference()
            if module is not None:
                self.route(module)

    def route(self, module: nn.Module) -> None:
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
