"""One call of a microbatch that is replayed, and how calls are run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.torch.program.instructions import Instruction
from shardwright.torch.pytorch.tree import leaves


@dataclass(slots=True)
class FlatCall:
    """One call.

    Attributes:
        run: what is called.
        gather: gives the leaves of its arguments from the places.
        arguments: makes (args, kwargs) of them; None where they are all by position.
        instruction: None for a free operation that the trace does not have.
        position: of that.
        cuts: (leaf, value of another stage), where nothing else must be found.
        finds: arguments must be found in another way, too.
        draws: it takes random numbers.
        keeps: something of its result is kept, or compared with the trace.
        place: of its result, where that is one tensor; -1 where nobody needs it.
        places: (leaf of the result, place), where it is not.
        last_uses: places that nobody needs any more.
        is_free: every rank runs it.
    """

    run: Callable[..., Any]
    gather: Callable[[list[Any]], tuple[Any, ...]]
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None
    instruction: Instruction | None
    position: int
    cuts: tuple[tuple[int, int], ...]
    finds: bool
    draws: bool
    keeps: bool
    place: int
    places: tuple[tuple[int, int], ...]
    last_uses: tuple[int, ...]
    is_free: bool


def run_calls(running: Any, turn: int | None) -> None:
    """Runs the calls of a turn."""
    for context, calls in running.flat.turns.get(turn, ()):
        if context is None:
            _run(running, calls)
        else:
            with context():
                _run(running, calls)


def _run(running: Any, calls: Sequence[FlatCall]) -> None:
    places, tensors, generators = running.places, running.tensors, running.generators
    for call in calls:
        instruction = call.instruction
        items: Any = call.gather(places)
        if call.cuts:
            assert instruction is not None
            items = list(items)
            for position, value in call.cuts:
                leaf = tensors.leaf(value, instruction.stage)
                items[position] = leaf[...] if leaf.requires_grad else leaf
        args, kwargs = (items, _NO_NAMES) if call.arguments is None else call.arguments(items)
        if call.draws:
            assert instruction is not None
            generators.before_step(instruction, call.position)
        if call.is_free:
            begun_s = time.perf_counter()
            result = call.run(*args, **kwargs)
            running.outside_s += time.perf_counter() - begun_s
        else:
            assert instruction is not None
            copied: dict[int, Tensor] = {}
            if call.finds:
                args, kwargs, copied = tensors.find(instruction, args, kwargs)
            if instruction.offload:
                with running.keeping(instruction):
                    result = call.run(*args, **kwargs)
            else:
                result = call.run(*args, **kwargs)
            if call.keeps:
                tensors.keep(instruction, result, args, kwargs, copied)
        if call.draws:
            generators.after_step(instruction)
        if call.place >= 0:
            places[call.place] = result
        elif call.places:
            items = leaves(result)
            for position, place in call.places:
                places[place] = items[position]
        for place in call.last_uses:
            places[place] = None


_NO_NAMES: dict[str, Any] = {}
