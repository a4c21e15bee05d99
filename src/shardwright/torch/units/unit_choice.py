"""Chooses the units of a model: the modules that are placed whole.

The code of such a module, between the calls of the modules inside it,

- keeps a tensor in an attribute of a module inside it (``self.cell.state = None``): with stages in between,
  other microbatches would find it there; or
- calls a custom ``autograd.Function`` that calls them (reversible layers): its backward runs them again, on
  tensors that are on other ranks; or
- gives them packed sequences, whose layout is in values that no trace knows; or
- calls them under ``torch.func``, on tensors or with weights that are no real ones.

The module is watched while the model runs once as a whole.

    if self.seen.numel() == 0:          the first microbatch
        self.seen.resize_(now.shape)
    self.seen.copy_(...)                all others

Such code reads the shape, so later microbatches take another path than the trace, which runs the first.

One forward on fake tensors shows which modules are called, how often, and each one's share of the work. Then
a walk descends the tree from the root. A module becomes a unit when it is a repeated block, when splitting it
would gain nothing, or when no called module inside it has parameters; otherwise the walk goes on with its
children. Modules without parameters (activations, dropout, containers) are glue between units.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardwright.errors import TraceError
from shardwright.torch._private.tensors import function_transforms_active
from shardwright.torch.pytorch.modules import custom_function_call, frames_up_to, is_running, user_line


class Entanglement:
    """Watches one forward of a model; give it every call of a module.

    Attributes:
        whole: names of the modules that cannot be split.
        hard: names of those that cannot even be traced in pieces -> what they do.
    """

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.hard: dict[str, str] = {}
        self._open: list[tuple[str, int | None]] = []
        # Copies of the model come and go where fake tensors cannot get through: none takes another's name.
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._written: dict[tuple[str, str], set[str]] = {}
        self._holds_tensor: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches writes to attributes of modules."""
        plain = nn.Module.__setattr__

        def write(module: nn.Module, key: str, value: Any) -> None:
            self._note(module, key, value)
            plain(module, key, value)

        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = plain  # type: ignore[method-assign]
        for place in self._holds_tensor & self._written.keys():
            # The model itself has to be split. Each microbatch has its own attributes (`OwnAttributes`).
            self.whole.update(self._written[place] - {""})

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in self._names:
            # The first call; or that of a copy, after an attempt that failed inside of it.
            del self._open[1:]
            prefix = f"{name}." if name else ""
            for inner, sub in module.named_modules():
                self._names[sub] = prefix + inner if inner else name
        frame = custom_function_call()
        if self._open and frame is not None and frame != self._open[-1][1]:
            self.whole.add(self._open[-1][0])
        what = _done_to_a_call(args)
        if what and self._open:
            self.hard[self._open[-1][0]] = what
            self.whole.add(self._open[-1][0])
        elif what.startswith("uses torch.func"):
            raise TraceError(
                f"{user_line()}: the step function {what} around {name or 'the model'}, whose modules then "
                "cannot be placed one by one. Do that in the forward of a module inside the model, which is "
                "then one unit; or have one stage: pipeline_parallel_degree 1."
            )
        self._open.append((name, frame))

    def leave(self) -> None:
        """The module entered last returns."""
        self._open.pop()

    def _note(self, module: nn.Module, key: str, value: Any) -> None:
        name = self._names.get(module)
        if not self._open or name is None:
            return
        if isinstance(value, Tensor):
            self._holds_tensor.add((name, key))
        writer = self._open[-1][0]
        # A hook of the module itself runs before it is entered: what it computes is the module's own.
        if writer != name and not is_running(module._forward_pre_hooks.values()):
            self._written.setdefault((name, key), set()).add(_common_ancestor(writer, name))


def _done_to_a_call(args: tuple[Any, ...]) -> str:
    """Describes what keeps a module from being a unit, in the code that calls it; mostly nothing."""
    if any(isinstance(item, PackedSequence) for item in args):
        return "packs sequences (pack_padded_sequence)"
    if function_transforms_active():
        return "uses torch.func (vmap, grad, jvp)"
    between = frames_up_to("torch.nn.utils.stateless")
    if between is not None and all(n.startswith(("torch.nn.modules.", "shardwright.")) for n in between):
        return "uses torch.func.functional_call"
    return ""


def _common_ancestor(first: str, second: str) -> str:
    parts: list[str] = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


class RemadeInForward:
    """Watches one forward of a model; give it every call of a module.

    Attributes:
        writers: names of the modules whose code does it.
    """

    def __init__(self) -> None:
        self.writers: set[str] = set()
        self._known: dict[str, Any] = {}

    def enter(self, name: str, module: nn.Module, *, around: str | None) -> None:
        now = _kinds_inside(name, module)
        if around is not None and any(self._known.get(place, kind) != kind for place, kind in now.items()):
            self.writers.add(around)
        self._known.update(now)

    def leave(self, name: str, module: nn.Module) -> None:
        now = _kinds_inside(name, module)
        if any(place not in self._known or self._known[place] != kind for place, kind in now.items()):
            self.writers.add(name)
        self._known.update(now)


def _kinds_inside(name: str, module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{key}": None if buffer is None else (buffer.shape, buffer.dtype)
        for path, sub in module.named_modules(prefix=name)
        for key, buffer in sub._buffers.items()
    }


# A module with less than this share of a stage's work is not split further: its pieces could not balance
# anything.
_SMALL_SHARE_OF_STAGE = 0.125
# A repeated block is split only where it alone is this much of a stage. So is any block without others inside
# where ranks share its parameters: what flows between units is whole, and what flows inside is in parts.
_LARGE_SHARE_OF_STAGE = 0.67
# Floating-point operations of a block that take a device as long as the host needs for its pieces: one with
# less is split only where there would be too few blocks for the stages.
_LITTLE_WORK = {"cpu": 5e7}
_LITTLE_WORK_OF_GPU = 5e10


@dataclass(slots=True)
class ModuleCost:
    """The work of one module in one forward.

    Attributes:
        calls: how often it was called through ``module(...)``.
        recomputed: the model recomputes its activations (``torch.utils.checkpoint``).
        whole: it cannot be split: see `shardwright.torch.units.unit_choice`.
        chooses_at_random: its own code draws random numbers and looks at values: as if it skipped itself.
    """

    calls: int = 0
    flops: int = 0
    recomputed: bool = False
    whole: bool = False
    chooses_at_random: bool = False


@dataclass(slots=True)
class _Walk:
    costs: dict[str, ModuleCost]
    called: frozenset[int]
    total: float
    num_stages: int
    forced: frozenset[int]
    preferred: frozenset[int]
    divides: bool
    little_work: float
    units: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def visit(self, module: nn.Module, name: str, *, repeated: bool) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if self._is_unit(module, name, repeated=repeated) and name:
            self.units.append(name)
            self.seen.update(id(sub) for sub in module.modules())
            return
        for child_name, child, is_repeated in _children(module):
            self.visit(child, f"{name}.{child_name}" if name else child_name, repeated=is_repeated)

    def _is_unit(self, module: nn.Module, name: str, *, repeated: bool) -> bool:
        cost = self.costs.get(name, ModuleCost())
        if cost.calls > 0 and id(module) in self.forced:
            return True
        if cost.calls == 0 or not _has_parameters(module):
            return False
        share_of_stage = self.share(name) * self.num_stages
        if cost.whole or (id(module) in self.preferred and share_of_stage <= 1.0):
            return True
        if not self._calls_inside(module):
            return True
        if repeated:
            # Those that have skipped themselves did no work, so that others have too large a share.
            largest = 1.0 if cost.flops <= self.little_work else _LARGE_SHARE_OF_STAGE
            return cost.chooses_at_random or share_of_stage <= largest
        in_one_piece = self.divides and not _has_repeated_blocks(module)
        return share_of_stage <= (_LARGE_SHARE_OF_STAGE if in_one_piece else _SMALL_SHARE_OF_STAGE)

    def _calls_inside(self, module: nn.Module) -> bool:
        """Whether modules inside with parameters are called, not only read, as in `nn.MultiheadAttention`."""
        return any(
            sub is not module and id(sub) in self.called and _has_parameters(sub) for sub in module.modules()
        )

    def share(self, name: str) -> float:
        """Share of the model's work."""
        return self.costs[name].flops / self.total if self.total else 0.0


def choose_units(
    model: nn.Module,
    costs: dict[str, ModuleCost],
    *,
    num_stages: int,
    forced: frozenset[int] = frozenset(),
    preferred: frozenset[int] = frozenset(),
    divides: bool = False,
    device: str = "cpu",
) -> list[str]:
    """The names of the units, in order of registration."""
    # A step may call parts of the model in the place of the model (a GAN's generator, its discriminator).
    total = float(sum(cost.flops for name, cost in costs.items() if not _is_called_inside(name, costs)))
    called = frozenset(id(model.get_submodule(name)) for name, cost in costs.items() if cost.calls)
    walk = _Walk(
        costs,
        called,
        total,
        num_stages=num_stages,
        forced=forced,
        preferred=preferred,
        divides=divides,
        little_work=_LITTLE_WORK.get(device, _LITTLE_WORK_OF_GPU),
    )
    walk.visit(model, "", repeated=False)
    return walk.units


def _is_called_inside(name: str, costs: Mapping[str, ModuleCost]) -> bool:
    """Whether a module around it is called."""
    while name:
        name = name.rpartition(".")[0]
        if name in costs:
            return True
    return False


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Children by name, and whether each is one of several siblings of one class that have children."""
    counts: dict[type, int] = {}
    for child in module.children():
        if next(child.children(), None) is not None:
            counts[type(child)] = counts.get(type(child), 0) + 1
    for name, child in module.named_children():
        yield name, child, counts.get(type(child), 0) >= 2 and not isinstance(child, _CONTAINERS)


def _has_repeated_blocks(module: nn.Module) -> bool:
    return any(repeated for sub in module.modules() for _, _, repeated in _children(sub))


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
