"""Times units, parts of divided units, and glue operations on the current device.

One call of each cost class is timed, on random data of the right shapes. It runs on copies of the modules, so
that neither weights nor running statistics change, and without hooks that only observe. All ranks of a host
measure at the same time, because they will run at the same time, sharing memory bandwidth and caches. Where
ranks outnumber cores, the time that counts is the time a rank had a core; the simulator models how they take
turns.

Smaller products take longer than their operations say. All ranks of a group do so at the same time, as they
will compute at the same time: they share caches and the bandwidth of the memory.
"""

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import ModelGraph
from shardwright.run.context import Context
from shardwright.run.timing import Timing, repetitions
from shardwright.torch.backward.split_backward import allow_split, put_off_weights, split_modules, unsplit
from shardwright.torch.counting.compiled_modules import compile_as, compile_whole
from shardwright.torch.counting.stand_in_data import copy_of_module, random_like
from shardwright.torch.interception.step_code import tracing
from shardwright.torch.python_state.shared_state import filled_copy
from shardwright.torch.pytorch.tensors import autocast_as
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.randomness import get_state, python_random_kept, set_state
from shardwright.torch.script_collectives import over_replicas
from shardwright.torch.tensor_parallel.search.dry_run import Phase, RankStep
from shardwright.torch.tensor_parallel.search.unit import Material, is_small
from shardwright.torch.tensor_parallel.search.ways import WorkShares
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.divided_costs import UnitPart

_MOST_OTHERS_BYTES = 16 * 2**20

_Seconds = tuple[float, float, float]
"""Of the forward; of the backward, or of the gradients of inputs; of those of weights."""


class Clock:
    """Tells the time when a device has done all that was asked of it."""

    def __init__(self, device: torch.device, *, share_cores: bool):
        self.device = device
        self._share_cores = share_cores

    def now(self) -> float:
        """Seconds since some moment."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._share_cores:
            return time.thread_time()
        return time.perf_counter()


def on_copies(context: Context, *, compiled: bool = False) -> Callable[[Any, str, bool], Timing]:
    """What times a class of a trace, given its key, for `Profiler`; random numbers stay what they are.

    Args:
        compiled: units are compiled first.
    """

    def time_class(trace: Any, key: str, share_cores: bool) -> Timing:
        generators = get_state(context.device)
        try:
            with python_random_kept():
                return measure_class(
                    trace.samples[key],
                    device=context.device,
                    share_cores=share_cores,
                    others_bytes=_bytes_of(trace.graph),
                    compiled=compiled,
                )
        finally:
            set_state(generators, context.device)

    return time_class


def _bytes_of(graph: ModelGraph) -> int:
    """What a microbatch uses: parameters with their gradients, and all values between units."""
    values = sum(value.spec.num_bytes for value in graph.values)
    return 2 * sum(parameter.spec.num_bytes for parameter in graph.parameters.values()) + values


@tracing()
def measure_class(
    sample: Sample,
    *,
    device: torch.device,
    share_cores: bool = False,
    others_bytes: int = _MOST_OTHERS_BYTES,
    compiled: bool = False,
) -> Timing:
    time_it = partial(
        _measured,
        sample,
        device=device,
        share_cores=share_cores,
        others_bytes=others_bytes,
        compiled=compiled,
    )

    def measured() -> Timing:
        with over_replicas(sends=False):
            return time_it()

    if not isinstance(sample.func, nn.Module):
        return measured()
    return sample.hooks.unseen(sample.func, measured)


def _measured(
    sample: Sample, *, device: torch.device, share_cores: bool, others_bytes: int, compiled: bool
) -> Timing:
    func, can_be_split = sample.func, False
    if isinstance(func, nn.Module):
        func = copy_of_module(func, device)
        compile_as(func, sample.func)
        if compiled:
            compile_whole(func)
        unsplit(list(func.modules()))  # a run before this one may have split the module
        can_be_split = bool(split_modules(func))
    wholes: list[_Seconds] = []
    parts: list[_Seconds] = []
    clock = Clock(device, share_cores=share_cores)
    empty_s = cache(partial(_empty_backward_s, clock))  # where there is a backward at all
    others = torch.zeros(
        min(others_bytes, _MOST_OTHERS_BYTES) if device.type == "cpu" else 0, dtype=torch.uint8
    )
    try:
        for _ in repetitions():
            for split, found in ((False, wholes), (True, parts)):
                if split <= can_be_split:
                    others.add_(1)
                    allow_split(split)
                    found.append(_run_once(func, sample, clock, empty_s, split=split))
    finally:
        allow_split(True)
        if isinstance(func, nn.Module):  # a split one refers to itself: its weights would stay for a while
            unsplit(list(func.modules()))
    return _timing(wholes[1:], parts[1:])


def _timing(wholes: Sequence[_Seconds], parts: Sequence[_Seconds]) -> Timing:
    """The medians of several runs with a backward in one, and of as many with one in two parts."""
    timing = Timing.of_runs(wholes)
    if not parts:
        return timing
    forward_in_parts_s, gradients_s, weight_s = (
        statistics.median(column) for column in zip(*parts, strict=True)
    )
    # A schedule has one price for a forward, so what allowing for two parts takes there goes here.
    input_s = max(0.0, gradients_s + forward_in_parts_s - timing.forward_s)
    return replace(timing, input_s=input_s, weight_s=weight_s)


def _run_once(
    func: Callable[..., Any],
    sample: Sample,
    clock: Clock,
    empty_backward_s: Callable[[], float],
    *,
    split: bool,
) -> _Seconds:
    args, kwargs = sample.structure.rebuild([_input_like(leaf, clock.device) for leaf in sample.leaves])
    with autocast_as(sample.autocast):
        start = clock.now()
        output = filled_copy(func, args, kwargs)
        forward_s = clock.now() - start
    roots = [t for t in _tensors(output) if t.requires_grad]
    if not roots:
        return forward_s, 0.0, 0.0
    gradients = [torch.ones_like(root) for root in roots]
    empty_s = empty_backward_s()
    start = clock.now()
    if not split:
        torch.autograd.backward(roots, gradients)
        return forward_s, max(0.0, clock.now() - start - empty_s), 0.0
    with put_off_weights(root.grad_fn for root in roots) as work:
        torch.autograd.backward(roots, gradients)
    middle = clock.now()
    for item in work:
        item()
    return forward_s, max(0.0, middle - start - empty_s), clock.now() - middle


def _input_like(leaf: Any, device: torch.device) -> Any:
    """An argument as another call would have made it: a leaf of autograd could not be changed in place."""
    item = random_like(leaf, device)
    return item.clone() if isinstance(item, Tensor) and item.requires_grad else item


def _empty_backward_s(clock: Clock) -> float:
    """Seconds of calling autograd: a stage does it once, and not once a unit."""
    found = []
    for _ in range(_RUNS):
        root = torch.ones((), device=clock.device, requires_grad=True) * 1.0
        gradient = torch.ones_like(root)
        start = clock.now()
        torch.autograd.backward([root], [gradient])
        found.append(clock.now() - start)
    return statistics.median(found)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


log = logging.getLogger(__name__)

_RUNS = 4

_MOST_S = 1.0
"""A part and its whole are run no more than once where that takes longer."""


@dataclass(slots=True, kw_only=True)
class TimesParts:
    """A `PartTimer` that runs both in turns on one rank: only how they compare is asked for.

    Attributes:
        operation_s: what an operation on divided tensors takes beyond its own time.
        samples: of calls, by cost class: with autocast, and with the hooks that change something. Others do
            not see that units are run.
        generators: the script's own, from which units draw: they stay as they are.
        budget_s: seconds that the parts of one way to divide the model may take.
        found: what was timed now, by part: its seconds for each second of the whole unit.
    """

    device: torch.device
    share_cores: bool
    operation_s: float
    samples: Mapping[str, Sample]
    generators: Sequence[torch.Generator] = ()
    budget_s: float = inf
    remembered: Mapping[str, Timing] = field(default_factory=dict)
    found: dict[str, Timing] = field(default_factory=dict)
    on_own_cores: Callable[[], AbstractContextManager[None]] = nullcontext
    left_s: float = inf

    def __call__(self, part: UnitPart, forward: Phase, backward: Phase) -> WorkShares | None:
        module = part.unit.module
        if not is_small(module):
            return None  # there must be room for two copies
        key = self._key(part)
        known = self.remembered.get(key) or self.found.get(key)
        if known is None:
            if self.left_s <= 0:
                return None
            known = self._timing(part, (forward, backward))
            if known is None:
                return None
            self.found[key] = known
        return WorkShares(known.forward_s, known.backward_s)

    @staticmethod
    def _key(part: UnitPart) -> str:
        """Of the call, of what follows it (a head takes another time with another loss), and of the part."""
        of_part = (
            sorted(part.cuts.items()),
            sorted(part.experts),
            part.rank,
            part.num_ranks,
            part.between,
            sorted(part.unit.shared),
        )
        digest = hashlib.sha256(repr(of_part).encode()).hexdigest()[:16]
        return f"{' '.join(part.unit.cost_classes)} part {digest}"

    def _timing(self, part: UnitPart, phases: tuple[Phase, Phase]) -> Timing | None:
        module = part.unit.module
        sample = self.samples[part.unit.cost_classes[0]]
        state, begun_s = get_state(self.device, self.generators), time.perf_counter()
        try:
            with self.on_own_cores(), python_random_kept():
                of_part, of_whole = sample.hooks.unseen(module, lambda: self._seconds(part, sample))
        except Exception as error:  # on random numbers; the work of its operations says what it takes
            log.info("a part of %s cannot be timed: %s", type(module).__name__, error)
            return None
        finally:
            set_state(state, self.device, self.generators)
            self.left_s -= time.perf_counter() - begun_s
        forward, backward = (
            max(taken_s - phase.num_divided * self.operation_s, 0.0) / whole_s if whole_s > 0 else 1.0
            for taken_s, whole_s, phase in zip(of_part, of_whole, phases, strict=True)
        )
        return Timing(forward_s=forward, backward_s=backward)

    @tracing()
    def _seconds(self, part: UnitPart, sample: Sample) -> tuple[list[float], list[float]]:
        """Of forward and backward, of the part and of the whole."""
        step_of = partial(
            RankStep,
            part.unit,
            rank=part.rank,
            num_ranks=part.num_ranks,
            prices=part.prices,
            autocast=sample.autocast,
        )
        material = partial(Material, is_random=True)
        runs = [
            step_of(material(), part.cuts, experts=part.experts, between=part.between),
            step_of(material(), {}),
        ]
        clock = Clock(self.device, share_cores=self.share_cores)
        times: list[list[tuple[float, float]]] = [[], []]
        most_s, begun_s = min(_MOST_S, self.left_s / 2), time.perf_counter()
        with over_replicas(sends=False):
            for done in range(1 + _RUNS):  # the first decides, and warms up
                if done > 1 and time.perf_counter() - begun_s > most_s:
                    break
                for run, found in zip(runs, times, strict=True):
                    found.append(_seconds_of_step(run, clock))
        # Few runs on a machine that may be busy: the fastest is the one that was disturbed least.
        of_part, of_whole = ([min(each) for each in zip(*found[1:], strict=True)] for found in times)
        return of_part, of_whole


def _seconds_of_step(step: RankStep, clock: Clock) -> tuple[float, float]:
    moments: list[float] = []
    step.run(lambda: moments.append(clock.now()))
    step.module.zero_grad()
    begun_s, turned_s, ended_s = moments
    return turned_s - begun_s, ended_s - turned_s
