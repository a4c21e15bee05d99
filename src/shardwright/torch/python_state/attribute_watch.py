"""Attributes of modules that a script sets between steps: ``model.use_auxiliary_loss = True`` after an epoch.

They may lead the step function another way, or change shapes and places in it, so a program holds for their
values. What modules set themselves, in a step, does not count; nor does an attribute whose new values made no
difference to the program several times (a step number, an annealed weight).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from shardwright.torch.python_state.snapshot import is_plain_object
from shardwright.torch.pytorch.modules import OF_EVERY_MODULE
from shardwright.torch.pytorch.tree import ABSENT, PLAIN

log = logging.getLogger(__name__)

_Place = tuple[int, str, str]

_NEVER_PLAIN = frozenset({dict, set, OrderedDict, nn.Parameter, type(torch.relu)})
_AS_IT_IS = PLAIN - {float}  # these are compared by themselves
_TIMES_WITHOUT_EFFECT = 3
_DIGESTS_KEPT = 64
_LONGEST = 64  # lists beyond are data


class AttributeWatch:
    """Plain attributes of a model's modules, and of plain objects in these (``self.config``)."""

    def __init__(self) -> None:
        self._modules: Sequence[nn.Module] = ()
        self._seen = _Identities()
        self._after_step: dict[_Place, Any] | None = None
        self._watched: dict[_Place, Any] = {}
        self._without_effect: dict[_Place, int] = {}
        self._digests: dict[Hashable, dict[str, Mapping[_Place, Any]]] = {}

    def step_begins(self, modules: Sequence[nn.Module]) -> Hashable:
        """The attributes that the script has set since the first step, with their values."""
        if self._after_step is None:
            self._modules = modules
            return ()
        if self._seen.are_same(modules) and not self._without_effect:
            return ()
        self._modules = modules
        now = plain_attributes(modules)
        before = self._after_step
        for place in now.keys() | before.keys():
            one, other = now.get(place, ABSENT), before.get(place, ABSENT)
            if one is not other and _differs(one, other):
                self._without_effect.setdefault(place, 0)
        counted = sorted(p for p, times in self._without_effect.items() if times < _TIMES_WITHOUT_EFFECT)
        self._watched = {place: now.get(place, ABSENT) for place in counted}
        return tuple((place, type(value), value) for place, value in self._watched.items())

    def step_ends(self) -> None:
        """Takes note of what is there now."""
        if self._after_step is None or not self._seen.are_same(self._modules):
            self._after_step = plain_attributes(self._modules)
            self._seen = _Identities(self._modules)

    def traced(self, signature: Hashable, digest: str) -> None:
        """Finds out which attributes make no difference."""
        known = self._digests.setdefault(signature, {})
        before = known.get(digest)
        last = next(reversed(known.values()), None)
        if last is not None:
            changed = [p for p, value in self._watched.items() if _differs(last.get(p, ABSENT), value)]
            for place in changed:
                same = before is not None
                self._without_effect[place] = self._without_effect[place] + 1 if same else 0
                if self._without_effect[place] == _TIMES_WITHOUT_EFFECT:
                    log.info("attribute %s does not change what is computed", ".".join(map(str, place[1:])))
        known.pop(digest, None)
        known[digest] = dict(self._watched)
        for many in (known, self._digests):
            while len(many) > _DIGESTS_KEPT:
                del many[next(iter(many))]  # type: ignore[arg-type]


class _Identities:
    """Everything that modules, and plain objects and lists in them, hold, to be compared by identity."""

    def __init__(self, modules: Sequence[nn.Module] = ()):
        self._modules = tuple(modules)
        self._holders: list[dict[str, Any]] = []
        self._values: list[Callable[[dict[str, Any]], tuple[Any, ...]]] = []
        self._lists: list[list[Any]] = []
        for module in modules:
            self._add(vars(module), objects=True)
        self._sizes = list(map(len, self._holders))
        self._held = self._now()

    def _add(self, holder: dict[str, Any], *, objects: bool) -> None:
        own = OF_EVERY_MODULE if objects else frozenset()  # of the module itself
        names = [name for name in holder if name not in own]
        self._holders.append(holder)
        # Of two names at least, so that it gives a tuple.
        self._values.append(itemgetter(*names, names[0]) if names else lambda _: ())
        for name, value in holder.items():
            kind = type(value)
            if kind in _AS_IT_IS or kind in _NEVER_PLAIN or name in own:
                continue
            if kind is list:
                self._lists.append(value)
            elif objects and is_plain_object(value) and not callable(value):
                self._add(vars(value), objects=False)

    def are_same(self, modules: Sequence[nn.Module]) -> bool:
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return False
        if list(map(len, self._holders)) != self._sizes:
            return False
        try:
            now = self._now()
        except KeyError:
            return False
        return len(now) == len(self._held) and all(map(is_, now, self._held))

    def _now(self) -> list[Any]:
        found: list[Any] = []
        for values, holder in zip(self._values, self._holders, strict=True):
            found += values(holder)
        for each in self._lists:
            found += each
        return found


def _differs(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or bool(one != other)


def plain_attributes(modules: Sequence[nn.Module]) -> dict[_Place, Any]:
    """Those of modules, and of plain objects in them: (place of the module, name, name inside) -> value."""
    found: dict[_Place, Any] = {}
    seen: set[int] = set()
    for number, module in enumerate(modules):
        held = vars(module)
        for name in held.keys() - OF_EVERY_MODULE:
            value = held[name]
            if type(value) in _NEVER_PLAIN:
                continue
            if type(value) in _AS_IT_IS:
                found[number, name, ""] = value
            elif (plain := _plain(value)) is not ABSENT:
                found[number, name, ""] = plain
            elif id(value) not in seen and is_plain_object(value) and not callable(value):
                seen.add(id(value))
                for inner, item in vars(value).items():
                    plain = item if type(item) in _AS_IT_IS else _plain(item)
                    if plain is not ABSENT:
                        found[number, name, inner] = plain
    return found


def _plain(value: Any) -> Any:
    """Something to compare by; `ABSENT` where it is not watched."""
    kind = type(value)
    if kind is float:
        return repr(value)  # a NaN, too, is equal to itself
    if kind in PLAIN:
        return value
    if (kind is list or kind is tuple) and len(value) <= _LONGEST:
        return repr(value) if all(type(item) in PLAIN for item in value) else ABSENT
    return ABSENT
