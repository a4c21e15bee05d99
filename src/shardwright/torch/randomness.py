"""Random numbers as a single process draws them.

A plain loop draws for microbatch 0 from top to bottom, then for microbatch 1, and so on, all from one
generator. A pipeline rank runs only some of these calls, in another order. So the trace records every draw,
and before a batch the rank replays them in the order of the plain loop. Draws of other ranks go to scratch
memory; before each draw of its own, the rank saves the generator state::

    plain loop        mb 0: [stage 0 draws][stage 1 draws]   mb 1: [stage 0 draws][stage 1 draws]
    rank of stage 1          scratch       state kept               scratch       state kept

So dropout masks are the same for any number of stages, and without stages. A model that draws nothing pays
nothing. How many numbers an operation draws mostly follows from shapes and strides. Where it follows from
values, a step leaves the generator in another state than the replay did, which is noticed after the step.

Such a draw cannot be intercepted; only the generator's state shows that it happened. Ranks draw the same
numbers if all begin a batch with the first rank's state, and if each reaches the draws in the same order.
That is the order of the microbatches as long as all draws are in one place::

    rank 0 | mb 0: draws | mb 1: draws | mb 0: later stage ...
    rank 1 | mb 0: draws, stage 1      | mb 1: draws, stage 1
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.torch._private.tensors import generator_key
from shardwright.torch.pytorch.tree import Structure, flatten

GeneratorState = tuple[Tensor | None, ...]
"""State of the CPU's generator, of the GPU's where the rank has one, and of those of the script's own."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor argument of a draw: enough to make one like it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Turn:
    """A step of this rank that draws."""

    before: GeneratorState
    after: GeneratorState


@dataclass(frozen=True, slots=True)
class Draw:
    """One operation that takes numbers from the generator.

    Attributes:
        items: leaves of its arguments, with shapes in place of tensors.
    """

    func: Any
    items: tuple[Any, ...]
    structure: Structure

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that it was given; None where it takes numbers from that of its device."""
        given = (item for item in self.items if isinstance(item, torch.Generator))
        return next((generator for generator in given if not is_default(generator)), None)


def is_default(generator: torch.Generator) -> bool:
    """Whether it is the one that operations on its device draw from unless told otherwise."""
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return generator_key(generator) in map(generator_key, defaults)


def describe_draw(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Describes an operation that draws; None if it draws nothing with these arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
        return None
    items, structure = flatten((tuple(args), dict(kwargs)))
    shapes = tuple(
        _Shape(tuple(item.shape), item.stride(), item.dtype, item.device)
        if isinstance(item, Tensor)
        else item
        for item in items
    )
    return Draw(func, shapes, structure.without_template())


def skip(draws: Sequence[Draw]) -> None:
    """Moves the generator on as if these operations had run."""
    with torch.no_grad():
        for draw in draws:
            args, kwargs = draw.structure.rebuild([_scratch(item) for item in draw.items])
            draw.func(*args, **kwargs)


def draw_as_elsewhere(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Moves the generator on as it moves on a rank that runs an operation."""

    def there(item: Any) -> Any:
        if isinstance(item, _Shape) and item.device.type == "meta":
            return replace(item, device=device)
        return device if item == torch.device("meta") else item

    draw = describe_draw(func, args, kwargs)
    if draw is not None:
        skip([replace(draw, items=tuple(map(there, draw.items)))])


def own_generators(draws: Iterable[Draw]) -> tuple[torch.Generator, ...]:
    """The generators that operations were given, each once."""
    found = (draw.generator for draw in draws)
    return tuple({generator_key(each): each for each in found if each is not None}.values())


def get_state(device: torch.device, own: Sequence[torch.Generator] = ()) -> GeneratorState:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.random.get_rng_state(), on_device, *(generator.get_state() for generator in own)


def set_state(state: GeneratorState, device: torch.device, own: Sequence[torch.Generator] = ()) -> None:
    on_cpu, on_device, *of_own = state
    assert on_cpu is not None
    torch.random.set_rng_state(on_cpu)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
    for generator, own_state in zip(own, of_own, strict=True):
        assert own_state is not None
        generator.set_state(own_state)


def same_state(one: GeneratorState, other: GeneratorState) -> bool:
    """Whether the same numbers follow."""
    return all(
        now is None or then is None or torch.equal(now, then) for now, then in zip(one, other, strict=True)
    )


def run_ahead(
    microbatches: Sequence[Sequence[tuple[tuple[Draw, ...], bool]]],
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
) -> tuple[list[dict[int, Turn]], GeneratorState]:
    """Goes through all draws of a batch in the order of the plain loop."""
    kept: list[dict[int, Turn]] = []
    for steps in microbatches:
        turns: dict[int, Turn] = {}
        for position, (draws, own) in enumerate(steps):
            if draws and own:
                before = get_state(device, generators)
                skip(draws)
                turns[position] = Turn(before, get_state(device, generators))
            elif draws:
                skip(draws)
        kept.append(turns)
    return kept, get_state(device, generators)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention kernels are marked as random also where their dropout is off."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    probability = given.get("dropout_p", defaults.get("dropout_p"))
    if probability is not None:
        return float(probability) == 0.0
    if given.get("train") is False or given.get("training") is False:
        return True
    return func.overloadpacket is torch.ops.aten.native_dropout and given.get("p") in (0.0, 0)


def _scratch(item: Any) -> Any:
    if not isinstance(item, _Shape):
        return item
    # Zeros are valid probabilities and means; ones are valid weights where a sum must not be zero.
    # Not all of its memory need be its own, and where it lies decides how many numbers some kernels draw.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.strides, strict=True))
    memory = torch.ones(max(reach, 0), dtype=item.dtype, device=item.device)
    return memory.as_strided(item.shape, item.strides)


SKIPS_BY_PYTHON = (
    "The step function draws random numbers of Python or NumPy between modules. If they decide which layers "
    "are called (layer dropping): draw in the forward of the layer, by torch.rand(()), and give its input "
    "back there; or call it always, and choose behind it by torch.where."
)
"""For errors of step functions that go another way each time."""

PythonState = tuple[Any, tuple[Any, ...]]
"""State of Python's generator, and of NumPy's."""


def kept_state(item: Any) -> Callable[[], Any] | None:
    """A function that puts a generator of a script back to its present state; None for other objects."""
    kind = type(item)
    if kind is random.Random:
        return partial(item.setstate, item.getstate())
    if kind is np.random.RandomState:
        return partial(item.set_state, item.get_state())
    if kind is np.random.Generator:
        return partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    return None


class DrawsOfPython:
    """Notices draws during a trace.

    Attributes:
        places: how many steps had run when numbers were drawn between units.
    """

    def __init__(self, position: Callable[[], float]):
        self.places: list[float] = []
        self.in_units = False
        self._position = position
        self._last = get_python_mark()

    def look(self) -> None:
        """To be called before every step, and at the end."""
        now = get_python_mark()
        if now != self._last:
            self.places.append(self._position())
            self._last = now

    @contextmanager
    def around_unit(self) -> Iterator[None]:
        """Leaves draws inside out of the draws between units; to be entered after `look`."""
        try:
            yield
        finally:
            now = get_python_mark()
            self.in_units = self.in_units or now != self._last
            self._last = now


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators back in the end."""
    before = get_python_state()
    try:
        yield
    finally:
        set_python_state(before)


def get_python_state() -> PythonState:
    return random.getstate(), np.random.get_state()  # type: ignore[return-value]


def set_python_state(state: PythonState) -> None:
    python, numpy = state
    random.setstate(python)
    np.random.set_state(numpy)


def state_as_tensor() -> Tensor:
    """The state of both generators; float64, of the same size always."""
    (_, words, gauss), (_, keys, position, has_gauss, cached) = get_python_state()
    row = [*words, float(gauss is not None), gauss or 0.0, position, has_gauss, cached]
    return torch.cat([torch.tensor(row, dtype=torch.float64), torch.from_numpy(keys.astype(np.float64))])


def state_from_tensor(state: Tensor) -> None:
    """Sets both generators as they were when `state_as_tensor` gave this."""
    (version, words, _), (kind, keys, *_) = get_python_state()
    row = state.tolist()
    has, gauss, position, has_cached, cached = row[len(words) : len(words) + 5]
    random.setstate((version, tuple(int(word) for word in row[: len(words)]), gauss if has else None))
    new = np.array(row[len(words) + 5 :]).astype(keys.dtype)
    np.random.set_state((kind, new, int(position), int(has_cached), cached))


def get_python_mark() -> tuple[Any, ...]:
    """A mark that stays equal as long as nothing is drawn."""
    python, (_, keys, *rest) = get_python_state()
    return python, keys.tobytes(), *rest
