"""Counts what each module does, chooses the units, and traces once for each microbatch size."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.config import Config
from shardwright.errors import DeferredReadError, TraceError
from shardwright.torch.backward.activation_checkpointing import is_marked
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.counting.compiled_modules import HookEffects, calls_compiled, compile_units
from shardwright.torch.counting.cost_counter import CostCounter, Counts
from shardwright.torch.interception.glue import intercept_calls, restore_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.modules import frames_up_to, has_backward_hooks
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.working_memory import WorkingMemory
from shardwright.torch.units.chunked_heads import with_chunked_heads
from shardwright.torch.units.unit_choice import Entanglement, ModuleCost, RemadeInForward, choose_units

log = logging.getLogger(__name__)


def discover(
    model: nn.Module,
    function: Callable[..., Any],
    arguments: Arguments,
    *,
    device: torch.device,
    on_module: Callable[[], None] | None = None,
) -> dict[str, ModuleCost]:
    """Costs of every module in one microbatch, by name of the module."""
    watch = _Watch(on_module)
    _watched_run(model, function, arguments, device, watch)
    _refuse_unsplittable(model, watch)
    _keep_whole(model, watch.costs, watch.remade.writers)
    _keep_entangled_whole(watch.costs, watch.entanglement.whole)
    return watch.costs


def _watched_run(
    model: nn.Module,
    function: Callable[..., Any],
    arguments: Arguments,
    device: torch.device,
    watch: "_Watch",
) -> None:
    handles = []
    try:
        # Hooks know names, not identities: a model that fake tensors cannot get through is traced as a copy.
        for name, module in model.named_modules():
            if _calls_by_itself(module):
                handles.append(_Counted.calls_of(module, name, watch))
                continue
            handles.append(module.register_forward_pre_hook(partial(watch.enter, name)))
            handles.append(module.register_forward_hook(partial(watch.leave, name)))
        intercept_calls(model)
        with watch.entanglement.watching():
            trace_step(UnitMap.of(model, [""]), function, arguments, device=device)
    finally:
        restore_calls(model)
        for handle in handles:
            handle.remove()


def _refuse_unsplittable(model: nn.Module, watch: "_Watch") -> None:
    """Refuses a model of which no module can be placed by itself."""
    if "" in watch.entanglement.hard:
        raise TraceError(
            f"the forward of the model itself {watch.entanglement.hard['']} around modules inside it, which "
            "then cannot be placed one by one. Move this code and these modules into a module of their own, "
            "which is then one unit. Or train by replicas alone (pipeline_parallel_degree 1), which take any "
            "model."
        )
    if watch.costs.keys() == {""} and _calls_by_itself(model):
        raise TraceError(
            f"{type(model).__name__} ({type(model).__module__}) calls layers that it has not registered as "
            "modules of PyTorch, so that they cannot be placed on stages. Register them in an nn.Module, "
            "self.layers = nn.ModuleList(model.layers), that calls one after the other; or start one rank "
            "for each replica: pipeline_parallel_degree 1."
        )


def _keep_entangled_whole(costs: dict[str, ModuleCost], entangled: Iterable[str]) -> None:
    """Keeps modules whole whose code reaches into the modules inside them."""
    for module in entangled:
        name = module
        while name and name not in costs:  # a container is not called
            name = name.rpartition(".")[0]
        if not name:
            log.warning(
                "The forward of the model itself calls modules inside it from an autograd.Function, whose "
                "backward may need tensors of other ranks. Move this code into a module of its own, which is "
                "then not split."
            )
        elif not costs[name].whole:
            costs[name].whole = True
            log.info("%s is not split: its own code reaches into the modules inside it", name)


def _keep_whole(model: nn.Module, costs: dict[str, ModuleCost], writers: Iterable[str]) -> None:
    """Keeps modules whole that give buffers another shape: their code may look at it, in each microbatch."""
    for writer in writers:
        name = writer
        while name and (name not in costs or next(model.get_submodule(name).parameters(), None) is None):
            name = name.rpartition(".")[0]
        if name and not costs[name].whole:
            costs[name].whole = True
            log.info("%s is not split: %s gives a buffer another shape or type", name, writer)


def _calls_by_itself(module: nn.Module) -> bool:
    """Whether its class has another way of being called than `torch.nn.Module`, which may know no hooks."""
    kind: Any = type(module)
    own = next(vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base))
    return getattr(own, "__module__", "").partition(".")[0] not in ("torch", "shardwright")


class _Counted:
    """Mixed into the class of a module that is called in another way (a layer of Keras)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, watch = vars(self)[_COUNTED]
        watch.enter(name, self, args)
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        watch.leave(name, self, args, result)
        return result

    @classmethod
    def calls_of(cls, module: nn.Module, name: str, watch: "_Watch") -> "_Plain":
        """Shows the calls of a module to a watch, until the result is asked to `remove` that."""
        kind: Any = type(module)
        vars(module)[_COUNTED] = name, watch
        # Such a class may have its own way of setting attributes, too.
        object.__setattr__(
            module, "__class__", type(kind.__name__, (cls, kind), {"__module__": kind.__module__})
        )
        return _Plain(module, kind)


@dataclass(frozen=True, slots=True)
class _Plain:
    """A module as it was before it was counted."""

    module: nn.Module
    kind: type

    def remove(self) -> None:
        object.__setattr__(self.module, "__class__", self.kind)
        del vars(self.module)[_COUNTED]


_COUNTED = "_shardwright_counted"


class _Watch:
    """Counts what modules do while they are called.

    Attributes:
        entanglement: which modules cannot be split.
    """

    def __init__(self, on_module: Callable[[], None] | None = None) -> None:
        self._on_module = on_module
        self.costs: dict[str, ModuleCost] = {}
        self.entanglement = Entanglement()
        self.remade = RemadeInForward()
        self._names: list[str] = []  # of the calls that are open
        self._counts: list[tuple[Counts, Counts]] = []  # at their beginning; what modules inside have done

    def __deepcopy__(self, memo: Any) -> "_Watch":
        return self  # hooks of a copied model count here, too

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        if self._on_module is not None:
            self._on_module()
        cost = self.costs.setdefault(name, ModuleCost())
        cost.calls += 1
        if not any(self.costs[outer].recomputed for outer in self._names):
            between = frames_up_to("torch.utils.checkpoint")
            if between is not None:
                # Code of the module around it in between: that module recomputes itself, not this one.
                own_code = any(not n.startswith(("torch.", "shardwright.", "functools")) for n in between)
                around = self._names[-1] if self._names and own_code else ""
                self.costs[around or name].recomputed = True
        self.entanglement.enter(name, module, args)
        self.remade.enter(name, module, around=self._names[-1] if self._names else None)
        self._names.append(name)
        self._counts.append((CostCounter.so_far(), Counts()))

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._names.pop()
        self.entanglement.leave()
        self.remade.leave(name, module)
        before, inside = self._counts.pop()
        done = CostCounter.so_far() - before
        if self._counts:
            outer, children = self._counts[-1]
            self._counts[-1] = outer, children + done
        own = done - inside
        self.costs[name].flops += done.flops
        self.costs[name].chooses_at_random |= own.draws > 0 and own.reads > 0


def most_stages(config: Config, *, pipeline: int, divides: bool) -> int:
    """The stages that a plan may have, which says how fine units need to be."""
    return pipeline * (config.virtual_stages or (1 if divides and pipeline == 1 else 2))


def trace_parts(
    model: nn.Module,
    function: Callable[..., Any],
    parts: Mapping[int, Batch],
    *,
    device: torch.device,
    num_stages: int,
    divides: bool = False,
    units: Sequence[str] | None = None,
    prepare: Callable[[UnitMap], None] | None = None,
    memory: dict[str, WorkingMemory] | None = None,
    agree_on_end: Callable[[float], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    loss_chunks: int | str = "off",
) -> dict[int, Trace]:
    """Traces every microbatch size with the same units; modules that cannot be split are kept whole."""
    if divides:  # ranks that share a head compute its logits whole, each its own columns
        loss_chunks = "off"
    count = None if progress is None else _Count(progress, total=len(list(model.modules())))
    trace = partial(
        trace_step,
        function=function,
        device=device,
        memory=memory,
        agree_on_end=agree_on_end,
        hooks=HookEffects(),
        units_may_change=True,
        on_unit=count,
    )
    if units is not None:
        with suppress(TraceError):
            return _traces(UnitMap.of(model, units), parts, trace, prepare, loss_chunks)
    arguments = next(iter(parts.values())).arguments
    costs = discover(model, function, arguments, device=device, on_module=count)
    forced: set[int] = set()
    preferred = _better_whole(model, costs)
    while True:
        names = choose_units(
            model,
            costs,
            num_stages=num_stages,
            forced=frozenset(forced),
            preferred=preferred,
            divides=divides,
            device=device.type,
        )
        if count is not None:
            count.more(len(names) * len(parts))
        try:
            return _traces(UnitMap.of(model, names), parts, trace, prepare, loss_chunks)
        except DeferredReadError as error:
            whole = _smallest_around(error, model, forced)
            if whole is None:
                raise
            log.warning("%s is not split, because its code reads values: %s", type(whole).__name__, error)
            forced.add(id(whole))


class _Count:
    """Counts calls of modules, and tells how many there were."""

    def __init__(self, progress: Callable[[int, int], None], *, total: int):
        self._progress = progress
        self._done, self._total = 0, total

    def more(self, number: int) -> None:
        """So many calls are to come; what was to come before is done."""
        self._done = self._total
        self._total += number

    def __call__(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


def _traces(
    unit_map: UnitMap,
    parts: Mapping[int, Batch],
    trace: Callable[..., Trace],
    prepare: Callable[[UnitMap], None] | None,
    loss_chunks: int | str,
) -> dict[int, Trace]:
    if prepare is not None:
        prepare(unit_map)
    compile_units(unit_map.model, list(unit_map.modules))
    for module in unit_map.modules.values():
        intercept_calls(module)
    try:
        traces: dict[int, Trace] = {}
        for m, part in parts.items():
            with _left_out(m, part) if traces else nullcontext():
                traces[m] = trace(unit_map, arguments=part.arguments, batch_size=part.num_samples or 1)
    finally:
        for module in unit_map.modules.values():
            restore_calls(module)
    return {m: with_chunked_heads(unit_map.model, trace, loss_chunks) for m, trace in traces.items()}


def _better_whole(model: nn.Module, costs: Mapping[str, ModuleCost]) -> frozenset[int]:
    """Ids of the modules that are kept whole where they fit into a stage."""
    return frozenset(
        id(module)
        for name, module in model.named_modules()
        if is_marked(module)
        or _recomputes_itself(module)
        or (name in costs and costs[name].recomputed)
        or has_backward_hooks(module)
        or calls_compiled(module)
    )


@contextmanager
def _left_out(m: int, part: Batch) -> Iterator[None]:
    """Does without a number of microbatches that the model cannot be called with, as others will do.

    A batch norm over channels, for example, refuses a single sample.
    """
    try:
        yield
    except DeferredReadError:
        raise
    except Exception as error:
        log.info("%d microbatches of %s samples are not considered: %s", m, part.num_samples, error)


def _recomputes_itself(module: nn.Module) -> bool:
    """Whether it is a layer of transformers that recomputes itself in training, unlike in evaluation."""
    is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def _smallest_around(error: DeferredReadError, model: nn.Module, forced: set[int]) -> nn.Module | None:
    """The smallest module around a failure that can be a unit."""
    inner = {id(module) for module in model.modules()} - {id(model)} - forced
    for module in reversed(error.inside):
        if id(module) in inner:
            assert isinstance(module, nn.Module)
            return module
    return None
