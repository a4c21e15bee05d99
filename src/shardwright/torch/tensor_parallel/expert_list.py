"""Runs experts of a list on the ranks that have them.

::

    found = torch.zeros(tokens, width)                       a sum over the ranks, of zeros so far
    for i in experts that some token takes:                  the routes are whole: all ranks know which
        found.index_add_(0, token, experts[i](x[token]))     a summand is added to a summand

Experts give sums over the ranks, to which only one has something to add. Such a sum stays one where it is
added to another one. An ordinary tensor of zeros cannot become one, so zeros are made as sums in the first
place. Numbers of routes go to all ranks as soon as there are some: what follows from them is the same
everywhere.

::

    rank 0, has the expert     x ──gather──► x ──► expert ──────► y, a summand
    rank 1, has others         x ──gather──► x ──► its shape ───► 0, a summand

The parameters of an expert are all on one rank. The code around the experts stays as it is: it calls each
expert on all ranks, and gets a sum over the ranks to which one of them has something to add (`RoutingCode`).
What an expert gets is whole on all ranks by then, as a rule.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.placement import Cut
from shardwright.torch._private.tensors import fake_mode_is_active, new_fake_mode, unset_fake_temporarily
from shardwright.torch.pytorch.tree import Structure, flatten, map_tree
from shardwright.torch.tensor_parallel.call import name_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, placement_of, whole
from shardwright.torch.tensor_parallel.expert_passages import Entered, entered, summand, summed
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import Spec

_CLASSES: dict[tuple[type, type], type] = {}


def put_before(first: type, module: nn.Module) -> None:
    """Makes a class the first base of that of a module, once; names stay as they are."""
    own = type(module)
    if issubclass(own, first):
        return
    if (first, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[first, own] = type(own.__name__, (first, own), names)
    module.__class__ = _CLASSES[first, own]


# What an empty tensor has may be anything, also zeros.
_ZEROS = frozenset(["zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"])


class _Underway(threading.local):
    """The code underway in this thread."""

    def __init__(self) -> None:
        self.modes: list[RoutingCode] = []


_UNDERWAY = _Underway()


class RoutingCode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, zeros of two dimensions or more are sums over the ranks, and all ranks have whole numbers."""

    def __init__(self, group: TensorGroup):
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group
        self.is_paused = False

    def __enter__(self) -> "RoutingCode":
        _UNDERWAY.modes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _UNDERWAY.modes.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.is_paused or func.namespace != "aten":
            return results
        if name_of(func) in _ZEROS:
            return self._zeros(results)
        if any(each.alias_info is not None for each in func._schema.returns):
            return results
        return map_tree(_known, results) if _is_divided(results) else results

    def _zeros(self, made: Tensor) -> Tensor:
        if made.dim() < 2 or not made.is_floating_point() or not made.is_contiguous():
            return made
        return summand(torch.zeros(made.shape, dtype=made.dtype, device=made.device), self._group)


def _is_divided(results: Any) -> bool:
    if isinstance(results, tuple | list):
        return any(each.__class__ is DividedTensor for each in results)
    return results.__class__ is DividedTensor


def _known(result: Any) -> Any:
    """Whole numbers on all ranks; any other tensor as it is."""
    is_cut = isinstance(result, Tensor) and isinstance(placement_of(result), Cut)
    return whole(result) if is_cut and not result.is_floating_point() else result


@contextmanager
def routing_paused() -> Iterator[None]:
    """Inside, everything is as elsewhere: an expert computes for itself."""
    paused = [mode for mode in _UNDERWAY.modes if not mode.is_paused]
    for mode in paused:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in paused:
            mode.is_paused = False


class Slot(NamedTuple):
    """Where a module has a parameter."""

    module: nn.Module
    key: str
    parameter: Any  # nn.Parameter, which is a `DividedTensor`


@contextmanager
def in_slots(slots: Sequence[Slot], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, modules have other tensors in the place of their parameters."""
    try:
        for (module, key, _), tensor in zip(slots, tensors, strict=True):
            module._parameters[key] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, key, parameter in slots:
            module._parameters[key] = parameter


def results_without_data(
    forward: Callable[..., Any], given: Sequence[Any], structure: Structure, slots: Sequence[Slot]
) -> Any:
    """What an expert gives, without data. The random numbers that it draws are drawn."""
    device, is_alone = slots[0].parameter.device, slots[0].parameter._spec.group.is_alone
    # Types depend on autocast, which goes by the device, and so does which kernel draws.
    goes_by_device = torch.is_autocast_enabled(device.type) or device.type != "cpu"
    fakes = new_fake_mode() if goes_by_device and not fake_mode_is_active() else nullcontext()
    target = device if goes_by_device else torch.device("meta")

    def like(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=target)

    with torch.no_grad(), fakes, _Draws(device, is_alone=is_alone):
        args, kwargs = structure.rebuild([like(each) for each in given])
        with in_slots(slots, [like(slot.parameter) for slot in slots]):
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                raise UsageError(
                    "an expert of a list does not run on tensors without data, of which ranks that do not "
                    f"have it learn the shape of what it gives ({type(error).__name__}: {error}). Route "
                    "tokens outside of it, or set expert_parallel_degree to 1."
                ) from error


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers that the rank with the expert draws: generators stay alike on all ranks."""

    def __init__(self, device: torch.device, *, is_alone: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._is_alone = device, is_alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not self._is_alone:
            with unset_fake_temporarily():
                own_kwargs = {key: self._with_data(value) for key, value in kwargs.items()}
                func(*(self._with_data(each) for each in args), **own_kwargs)
        return func(*args, **kwargs)

    def _with_data(self, value: Any) -> Any:
        """Zeros in the place of a tensor, and this rank's device in the place of none."""
        if isinstance(value, torch.device):
            return self._device
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
        return made.zero_()


@dataclass(frozen=True, slots=True)
class _List:
    """A list of experts."""

    name: str
    parent: nn.Module
    parent_name: str
    experts: Mapping[str, nn.Module]


def cuts_of_listed_experts(model: nn.Module, *, num_ranks: int, units: Iterable[str]) -> dict[str, Cut]:
    """Which rank has which expert: the cuts of parameters, by name."""
    found: dict[str, Cut] = {}
    stay = reasons_to_stay(model, num_ranks=num_ranks, units=units)
    for each in _lists(model):
        if each.name in stay:
            continue
        owners = Cut.even(0, len(each.experts), num_ranks=num_ranks).bounds()
        for place, (key, expert) in enumerate(each.experts.items()):
            owner = next(rank for rank, a, b in owners if a <= place < b)
            for name, parameter in expert.named_parameters():
                found[f"{each.name}.{key}.{name}"] = Cut.of(0, [(owner, parameter.shape[0])])
    return found


def reasons_to_stay(model: nn.Module, *, num_ranks: int, units: Iterable[str]) -> dict[str, str]:
    """Why each rank has all experts of a list, by the name of the list; not of lists that ranks share."""
    units = frozenset(units)
    times: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        times[id(parameter)] = times.get(id(parameter), 0) + 1
    reasons = {each.name: _reason_to_stay(each, num_ranks, units, times) for each in _lists(model)}
    return {name: reason for name, reason in reasons.items() if reason}


def run_listed_experts(model: nn.Module) -> None:
    """Has experts of lists run on the ranks that have them; whole ones run as they did."""
    for each in _lists(model):
        put_before(_CallsExperts, each.parent)
        for expert in each.experts.values():
            put_before(_OnOneRank, expert)


def _lists(model: nn.Module) -> Iterator[_List]:
    for parent_name, parent in model.named_modules():
        for key, child in parent._modules.items():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_experts(key, child):
                name = f"{parent_name}.{key}" if parent_name else key
                yield _List(name, parent, parent_name, dict(child.named_children()))


def _has_experts(key: str, child: nn.Module) -> bool:
    experts = list(child.children())
    named = [key, type(child).__name__]
    return bool(experts) and (
        any("expert" in name.lower() for name in named)
        or all("expert" in type(each).__name__.lower() for each in experts)
    )


def _reason_to_stay(one: _List, num_ranks: int, units: frozenset[str], times: Mapping[int, int]) -> str:
    experts = list(one.experts.values())
    parameters = [each for expert in experts for each in expert.parameters()]
    if len(experts) < num_ranks:
        return f"it has {len(experts)}, and {num_ranks} ranks share them"
    if not parameters or any(not each.dim() for each in parameters):
        return "an expert has no parameters, or one without dimensions"
    if any(next(expert.buffers(), None) is not None for expert in experts):
        return "its experts have buffers, which all ranks would need"
    if any(times[id(each)] > 1 for each in parameters):
        return "experts share parameters with other modules"
    if not any(unit in ("", one.parent_name) or one.parent_name.startswith(f"{unit}.") for unit in units):
        return "each expert is a unit of its own: all tokens go to all of them"
    return ""


# ---- the module that calls experts ----


class _CallsExperts(nn.Module):
    """The class of a module that has a list of experts has it as its first base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward so that what experts give is added up without exchanges."""
        group = _group_of(self)
        if group is None:
            return super().forward(*args, **kwargs)
        group.route_tokens()
        with RoutingCode(group):
            return super().forward(*args, **kwargs)


def _group_of(parent: nn.Module) -> TensorGroup | None:
    """The ranks that share experts in a list of a module; None where each has all."""
    for child in parent._modules.values():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for expert in child.children():
                if isinstance(expert, _OnOneRank):
                    spec = _spec_of(expert)
                    return None if spec is None else spec.group
    return None


# ---- an expert ----


class _OnOneRank(nn.Module):
    """The class of an expert of a list has it as its first base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the expert on the rank that has it, and gives sums over the ranks."""
        spec = _spec_of(self)
        if spec is None:
            return super().forward(*args, **kwargs)
        slots = _slots_of(self)
        given, structure = flatten((args, kwargs))
        with routing_paused():
            inside = entered(given, [slot.parameter for slot in slots])
            if _owner(spec) == spec.group.rank:
                own_args, own_kwargs = structure.rebuild(inside.items)
                with in_slots(slots, inside.parts):
                    found = super().forward(*own_args, **own_kwargs)
            else:
                found = results_without_data(super().forward, inside.items, structure, slots)
            return _summed(found, inside, spec)


def _spec_of(expert: nn.Module) -> Spec | None:
    """The description of a parameter of an expert that is on one rank; None where the expert is not."""
    specs = [each._spec if isinstance(each, DividedTensor) else None for each in expert.parameters()]
    first = specs[0] if specs else None
    if first is None or any(each is None or _owner(each) != _owner(first) for each in specs):
        return None
    return None if _owner(first) is None else first


def _owner(spec: Spec) -> int | None:
    """The rank that has all elements."""
    cut = spec.placement
    return cut.runs[0].rank if isinstance(cut, Cut) and len(cut.runs) == 1 else None


def _slots_of(expert: nn.Module) -> list[Slot]:
    return [
        Slot(module, key, parameter)
        for module in expert.modules()
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DividedTensor)
    ]


def _summed(found: Any, inside: Entered, spec: Spec) -> Any:
    """Sums over the ranks, to which the one that has the expert adds what that gives."""
    items, structure = flatten(found)
    places = _places_of_tensors(items)
    own = [items[each] for each in places]
    if _owner(spec) != spec.group.rank:
        own = [torch.zeros(each.shape, dtype=each.dtype, device=spec.device) for each in own]
    for place, total in zip(places, summed(own, inside, spec.group), strict=True):
        items[place] = total
    return structure.rebuild(items)


def _places_of_tensors(items: Sequence[Any]) -> list[int]:
    places = [place for place, each in enumerate(items) if isinstance(each, Tensor)]
    for place in places:
        if not items[place].is_floating_point():
            raise UsageError(
                f"an expert of a list gives a tensor of {items[place].dtype}, and what experts give is added "
                "up over the ranks that share them. Have it give floating-point numbers, or set "
                "expert_parallel_degree to 1."
            )
    return places
