"""Which units of a trace ranks may divide, and which parameters every rank needs whole.

A unit stays whole where its code may leave PyTorch's dispatcher. A parameter stays whole where code between
units uses it, or the script has hooked its gradient.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import partial

from torch import nn

from shardwright.model_graph import ModelGraph
from shardwright.placement import WHOLE, Placement
from shardwright.torch.counting.compiled_modules import calls_compiled, is_compiled
from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.interception.attribute_inputs import FOUND
from shardwright.torch.python_state.filled_containers import filled_copy
from shardwright.torch.pytorch.module_hooks import has_backward_hooks
from shardwright.torch.tensor_parallel.search import Material, Unit, results_of
from shardwright.torch.tracing.divided_tail import DividedTail, TailRun
from shardwright.torch.tracing.trace_data import Trace

__all__ = [
    "by_reason",
    "divisible_units",
    "observers_aside",
    "parameters_kept_whole",
    "shared_arguments",
    "warn_of_whole",
]

log = logging.getLogger(__name__)


def divisible_units(
    model: nn.Module, trace: Trace, tails: Mapping[int, DividedTail]
) -> Iterator[tuple[str, Unit]]:
    """The units that may be divided, each with the arguments of a call of its cost class."""
    seen: set[str] = set()
    whole: dict[str, list[str]] = {}
    for number, node in enumerate(trace.graph.nodes):
        if node.kind != "unit" or node.name in seen:
            continue
        seen.add(node.name)
        module, sample = model.get_submodule(node.name), trace.samples[node.cost_class]
        args, kwargs = sample.structure.rebuild(sample.leaves)
        if next(module.parameters(), None) is None:
            continue
        if reason := _reason_to_stay(module, kwargs):
            whole.setdefault(reason, []).append(node.name)
        else:
            tail = tails.get(number)
            following = None if tail is None else partial(_run_of, tail, trace)
            behind = () if tail is None else (trace.graph.nodes[each].cost_class for each in tail.nodes)
            classes = (node.cost_class, *behind)
            yield (
                node.name,
                Unit(module, args, kwargs, following=following, cost_classes=classes, run=filled_copy),
            )
    for reason, names in whole.items():
        warn_of_whole(names, reason)


def observers_aside(trace: Trace, units: Iterable[Unit]) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which hooks that only look on do not see that units are run, and run for nothing.

    Units whose forward needs what such a hook leaves somewhere keep theirs.
    """
    hooks = next((sample.hooks for sample in trace.samples.values()), HookEffects())

    def runs_without(unit: Unit) -> bool:
        if not hooks.looks_on([unit.module]):
            return True
        try:
            with hooks.aside([unit.module]):
                results_of(unit.module, unit.args, unit.kwargs, run=unit.run)
        except Exception as error:
            log.debug("%s does not run without its hooks: %s", type(unit.module).__name__, error)
            return False
        return True

    modules = [unit.module for unit in units if runs_without(unit)]
    return partial(hooks.aside, modules)


def shared_arguments(trace: Trace, model: nn.Module, divided: AbstractSet[int]) -> dict[str, frozenset[int]]:
    """Places of arguments that an earlier unit has taken, too: gradients are added up, and placed once."""
    found: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for step in trace.steps:
        node = None if step.node is None else trace.graph.nodes[step.node]
        if node is None or node.kind != "unit" or node.name in found:
            continue
        if any(id(each) in divided for each in model.get_submodule(node.name).parameters()):
            found[node.name] = frozenset(position for position, value in step.reads if value in taken)
            taken.update(value for _, value in step.reads)
    return found


def parameters_kept_whole(model: nn.Module, graph: ModelGraph) -> dict[str, Placement]:
    """The parameters of which every rank needs all elements, by each of their names."""
    in_units = {name for unit in graph.units.values() for name in unit.parameters}
    between = {name for node in graph.nodes for name in node.parameters}
    between |= graph.parameters.keys() - in_units
    whole = {id(each) for name, each in model.named_parameters() if name in between or _is_hooked(each)}
    names = model.named_parameters(remove_duplicate=False)
    return {name: WHOLE for name, each in names if id(each) in whole}


def by_reason(kept_whole: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in kept_whole.items():
        names.setdefault(reason, []).append(name)
    return names


def warn_of_whole(names: Sequence[str], reason: str) -> None:
    shown = ", ".join(name or "the model" for name in names[:3])
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    log.warning("%s%s stays whole on all ranks: %s", shown, more, reason)


def _run_of(tail: DividedTail, trace: Trace, material: Material) -> TailRun:
    return TailRun(tail, trace, material.like)


def _reason_to_stay(module: nn.Module, kwargs: Mapping[str, object]) -> str:
    """Why each rank must have all of a unit's parameters; empty where none must."""
    if _leaves_dispatcher(module):
        return "its code is compiled or scripted"
    if has_backward_hooks(module):
        return "its gradients are hooked"
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        return "replicas share its statistics"
    return "it reads attributes that others set" if FOUND in kwargs else ""


def _leaves_dispatcher(module: nn.Module) -> bool:
    inside = list(module.modules())
    scripted = any(type(each).__module__.startswith("torch.jit") for each in inside)
    return scripted or any(is_compiled(each) or calls_compiled(each) for each in inside)


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether the script has hooked the gradient of a parameter, and expects all of it."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
