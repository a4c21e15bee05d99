"""The calls of a recording as lists, one for each stage of this rank, over numbered places for values."""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.execution.microbatches.rank_microbatch import operation_run, unit_run
from shardwright.torch.execution.replay.flat_calls import FlatCall
from shardwright.torch.execution.replay.held_state import ImpureError
from shardwright.torch.execution.replay.recording import Call, GivenObject, Recording, Settings, Source
from shardwright.torch.interception.glue import UnitCall, call_without_hooks
from shardwright.torch.program.instructions import Place
from shardwright.torch.program.program import Program, copied_out
from shardwright.torch.pytorch.functions import CALLS_UNITS, name_of_call
from shardwright.torch.pytorch.tensors import autocast_as
from shardwright.torch.pytorch.tree import Structure
from shardwright.torch.script_collectives import COLLECTIVES

_LARGEST_CONSTANT = 1 << 16  # bytes


def why_not(program: Program) -> str:
    """What a trace knows to stand in the way of a replay; empty where nothing does."""
    trace, effects = program.trace, program.trace.effects
    reasons = (
        (trace.ends or not program.reads_nothing, "the step function reads values"),
        (trace.recomputes, "torch.utils.checkpoint is used between units"),
        (effects.attributes, "attributes that are read between units change in a step"),
        (effects.left_in_units, "units leave attributes"),
        (effects.temporary_hooks, "hooks are registered in a step"),
        (effects.changes_batch, "the batch is changed in place"),
        (effects.replaced_buffers or program.state, "buffers change between units"),
        (trace.random.python_at, "Python draws random numbers"),
        (trace.random.set_at, "generators are set"),
    )
    for stands, reason in reasons:
        if stands:
            return reason
    for each in program.instructions:
        unit, func = each.step.unit, each.step.func
        if unit.fills or unit.found or unit.attributes or unit.passed_attributes:
            return f"{name_of_call(func)} fills containers or uses attributes outside of it"
        if func in COLLECTIVES:
            return "the script exchanges tensors with other ranks between units"
        if func in CALLS_UNITS:
            return f"{name_of_call(func)} calls units"
        if isinstance(func, nn.Module) and (func._forward_hooks or func._forward_pre_hooks):
            return f"{name_of_call(func)} has hooks"
    return ""


class FlatProgram:
    """What this rank runs of a microbatch."""

    def __init__(self, program: Program, recording: Recording, before: Recording):
        assert recording.result_structure is not None
        assert recording.entry is not None
        self._template: list[Any] = []
        self._held: list[tuple[int, dict[str, Any], str]] = []
        self._batch: list[tuple[int, int]] = []
        self._pickled: list[tuple[int, bytes]] = []
        self._objects = list(zip(recording.objects, before.objects, strict=True))
        self._place_of: dict[Any, int] = {}
        self._program = program
        self.trains = recording.behind_backward is not None
        self.result_structure = recording.result_structure
        calls = _needed(recording)
        self._always = _constants(recording, calls)
        calls = {number: call for number, call in calls.items() if number not in self._always}
        turns = _turns(program, recording, calls)
        flat = {number: self._flat(call, number) for number, call in calls.items()}
        self.result = [self._place(source) for source in recording.result]
        _free_at_last_use(flat, set(self.result))
        self.turns: dict[int | None, list[tuple[Any, list[FlatCall]]]] = {}
        for turn, numbers in turns.items():
            segments: list[tuple[Any, list[FlatCall]]] = []
            settings: Settings | None = None
            for number in numbers:
                own = calls[number].settings
                if not segments or own != settings:
                    settings = own
                    segments.append((_context(own, recording.entry), []))
                segments[-1][1].append(flat[number])
            self.turns[turn] = segments

    def places(self, batch_leaves: Sequence[Any]) -> list[Any]:
        """The places of a microbatch, with what is in them at its begin."""
        places = self._template.copy()
        for place, leaf in self._batch:
            places[place] = batch_leaves[leaf]
        for place, held, name in self._held:
            places[place] = held[name]
        for place, pickled in self._pickled:
            places[place] = pickle.loads(pickled)
        return places

    # ---- inside ----

    def _place(self, source: Source) -> int:
        kind = source[0]
        if kind in ("fixed", "deferred"):
            self._template.append(source[1])
            return len(self._template) - 1
        if kind == "call" and source[1] in self._always:
            return self._place(("fixed", self._always[source[1]]))
        key = source if kind != "held" else (kind, id(source[1]), *source[2:])
        place = self._place_of.get(key)
        if place is None:
            place = self._place_of[key] = len(self._template)
            self._template.append(None)
            if kind == "batch":
                self._batch.append((place, source[1]))
            elif kind == "object":
                self._place_object(place, *self._objects[source[1]])
            elif kind == "held":
                self._held.append((place, getattr(source[1], source[2]), source[3]))
        return place

    def _place_object(self, place: int, now: GivenObject, before: GivenObject) -> None:
        item = now.find()
        if item is not None and item is before.find():
            self._template[place] = item  # it stays
        elif now.pickled and now.pickled == before.pickled:
            self._pickled.append((place, now.pickled))
        else:
            raise ImpureError("units are given objects that are others each time")

    def _flat(self, call: Call, number: int) -> FlatCall:
        instruction = call.instruction
        is_free = instruction is None or instruction.place is Place.FREE
        finds, keeps, draws = False, False, False
        cuts: tuple[tuple[int, int], ...] = ()
        if instruction is not None:
            step, flow = instruction.step, instruction.flow
            draws = bool(step.draws) or step.looks_at_values
        if instruction is not None and not is_free:
            cuts = flow.cuts
            twice = len({value for _, value in cuts}) < len(cuts)
            finds = bool(flow.held or flow.buffers or flow.copies or flow.changes or twice)
            asked = flow.keeps or flow.changes or instruction.shapes
            keeps = bool(asked or step.result.numbers or step.result.passed)
        elsewhere = {position for position, _ in cuts}
        if instruction is not None:
            elsewhere |= {position for position, _ in instruction.flow.held}
        sources = [("fixed", None) if p in elsewhere else s for p, s in enumerate(call.sources)]
        results = [self._place(("call", number, place)) for place in range(call.num_results)]
        return FlatCall(
            run=_runner(call, self._program),
            gather=_gatherer([self._place(source) for source in sources]),
            arguments=None if _is_positional(call.structure) else call.structure.arguments(),
            instruction=instruction,
            position=call.position,
            cuts=() if finds else cuts,
            finds=finds,
            draws=draws,
            keeps=keeps,
            place=results[0] if call.is_one else -1,
            places=() if call.is_one else tuple(enumerate(results)),
            last_uses=(),
            is_free=is_free,
        )


def _needed(recording: Recording) -> dict[int, Call]:
    """The calls, but for free operations of which this rank does not need the result."""
    wanted = {source[1] for source in recording.result if source[0] == "call"}
    changes = any(call.changes and _is_free(call) for call in recording.calls)
    found: dict[int, Call] = {}
    for number in range(len(recording.calls) - 1, -1, -1):
        call = recording.calls[number]
        if not changes and _is_free(call) and number not in wanted:
            continue
        found[number] = call
        wanted.update(source[1] for source in call.sources if source[0] == "call")
    return dict(reversed(found.items()))


def _constants(recording: Recording, calls: dict[int, Call]) -> dict[int, Tensor]:
    """The results of small free operations that rest on nothing of the batch: masks, positions; by number."""
    found: dict[int, Tensor] = {}
    if any(call.changes for call in recording.calls):
        return found
    returned = {source[1] for source in recording.result if source[0] == "call"}
    for number in reversed(calls):  # what is returned may share memory with what it is made of
        if number in returned and _is_free(calls[number]):
            returned.update(source[1] for source in calls[number].sources if source[0] == "call")
    for number, call in calls.items():
        step = None if call.instruction is None else call.instruction.step
        draws = step is not None and (step.draws or step.looks_at_values)
        fixed = [source[0] == "fixed" and not isinstance(source[1], Tensor) for source in call.sources]
        known = [source[0] == "call" and source[1] in found for source in call.sources]
        if not _is_free(call) or not call.is_one or draws or number in returned:
            continue
        if not all(one or other for one, other in zip(fixed, known, strict=True)):
            continue
        items = [found[source[1]] if source[0] == "call" else source[1] for source in call.sources]
        args, kwargs = call.structure.rebuild(items)
        assert recording.entry is not None
        context = _context(call.settings, recording.entry)
        with nullcontext() if context is None else context():
            result = call.func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.requires_grad and result.nbytes <= _LARGEST_CONSTANT:
            found[number] = result
    return found


def _is_free(call: Call) -> bool:
    return call.instruction is None or call.instruction.place is Place.FREE


def _turns(program: Program, recording: Recording, calls: dict[int, Call]) -> dict[int | None, list[int]]:
    """The numbers of the calls of each stage; None for those behind the backward, or for the result alone."""
    turns: dict[int | None, list[int]] = {}
    waiting: list[int] = []
    end = recording.behind_backward
    for number, call in calls.items():
        waiting.append(number)
        if _is_free(call) or (end is not None and number >= end):
            continue
        assert call.instruction is not None
        stage = call.instruction.stage
        if stage in turns and next(reversed(turns)) != stage:
            raise ImpureError("stages of this rank take turns within a forward")
        turns.setdefault(stage, []).extend(waiting)
        waiting = []
    if waiting:
        turns[None] = waiting
    return turns


def _free_at_last_use(flat: dict[int, FlatCall], result: set[int]) -> None:
    """Notes at each call which places nobody needs behind it."""
    made = {place for call in flat.values() for place in _made(call)}
    needed = set(result)
    for call in reversed(flat.values()):
        gathered = call.gather(range(1 << 30)) if call.gather is not None else ()  # type: ignore[arg-type]
        used = set(gathered)
        mine = (used | set(_made(call))) & made
        call.last_uses = tuple(sorted(mine - needed))
        needed |= used


def _made(call: FlatCall) -> tuple[int, ...]:
    return (call.place,) if call.place >= 0 else tuple(place for _, place in call.places)


def _gatherer(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if not places:
        return lambda values: ()
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)


def _is_positional(structure: Structure) -> bool:
    """Whether leaves are all the arguments, none by its name."""
    args, kwargs = structure.children
    return not kwargs.children and all(child.kind == "leaf" for child in args.children)


def _runner(call: Call, program: Program) -> Callable[..., Any]:
    """Runs a unit, or an operation between units, as `Microbatch` does."""
    instruction, func = call.instruction, call.func
    if instruction is None or instruction.place is Place.FREE:
        run: Callable[..., Any] = func
        return run
    if isinstance(func, nn.Module):
        plain = instruction.recompute or instruction.divided or instruction.flow.may_change is not None
        run = _call_of(func)
        if plain:
            run = unit_run(instruction, boundary=program.boundary, microbatch=-1)
    else:
        run = operation_run(func, instruction, program.boundary)
    own = instruction.step.unit.own_results
    if own:
        inner = run
        return lambda *args, **kwargs: copied_out(inner(*args, **kwargs), own)
    return run


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The unit's own call: it has no hooks, or another program is made, and no handler is in force."""
    if isinstance(unit, UnitCall):
        own: Callable[..., Any] = type(unit)._user_class.__call__.__get__(unit)
        return own

    def run(*args: Any, **kwargs: Any) -> Any:
        return call_without_hooks(unit, *args, **kwargs)

    return run


def _context(own: Settings, entry: Settings) -> Callable[[], AbstractContextManager[None]] | None:
    """Has the settings of a call in force; None where they are those of the whole microbatch."""
    if own == entry:
        return None
    if own.others != entry.others:
        raise ImpureError(
            "settings of PyTorch (attention, determinism, hooks for saved tensors) change between units"
        )

    @contextmanager
    def context() -> Any:
        cache = torch.is_autocast_cache_enabled()
        with torch.set_grad_enabled(own.grad_enabled), autocast_as(own.autocast):
            torch.set_autocast_cache_enabled(own.autocast_cache)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cache)

    return context
