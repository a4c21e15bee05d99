"""Python attributes of modules while microbatches take turns: each finds what it wrote.

What it has not written yet it finds as the microbatch before it left it (see `attribute_use`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.torch.attribute_use import AttributeUse, Place
from shardwright.torch.container_content import content_of, has_content, put_content

__all__ = ["OwnAttributes"]

_Content = tuple[Any, Any]  # the object, and what is in it if it is a container
_ABSENT: Any = object()


class OwnAttributes:
    """The attributes that the microbatches of one batch change.

    Args:
        uses: of all programs of the batch.
        num_microbatches: of the batch.
    """

    def __init__(self, uses: Iterable[AttributeUse], *, num_microbatches: int):
        places = {(id(use.module), use.key): use for use in uses}
        self._places: list[Place] = [(use.module, use.key) for use in places.values()]
        # Of the graph of one microbatch, and nobody looks for it behind `backward`: it need not live longer.
        self._passing = [
            use.first_read is None and use.carries_tensor and not use.read_late for use in places.values()
        ]
        self._last = num_microbatches - 1
        self._initial = [_content(place) for place in self._places]
        self._written: list[dict[int, _Content]] = [{} for _ in self._places]

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Has the modules hold what this microbatch finds; takes note of what it writes."""
        found = [self._found_by(number, microbatch) for number in range(len(self._places))]
        for place, content in zip(self._places, found, strict=True):
            _put(place, content)
        try:
            yield
        finally:
            for number, (place, before) in enumerate(zip(self._places, found, strict=True)):
                now = _content(place)
                # The same object may have been written again.
                if self._passing[number] or not _same(now, before):
                    self._written[number][microbatch] = now

    def backward_reached(self, microbatch: int) -> None:
        """Lets go of what nobody will ask this microbatch for."""
        if microbatch != self._last:
            for written, passing in zip(self._written, self._passing, strict=True):
                if passing:
                    written.pop(microbatch, None)

    def finish(self) -> None:
        """Leaves what a plain loop would leave: what the last microbatch wrote."""
        for number, place in enumerate(self._places):
            _put(place, self._found_by(number, self._last))

    def _found_by(self, number: int, microbatch: int) -> _Content:
        written = self._written[number]
        last = max((index for index in written if index <= microbatch), default=None)
        return self._initial[number] if last is None else written[last]


def _content(place: Place) -> _Content:
    module, key = place
    value = vars(module).get(key, _ABSENT)
    return value, content_of(value)


def _put(place: Place, content: _Content) -> None:
    module, key = place
    value, inside = content
    if value is _ABSENT:
        vars(module).pop(key, None)
        return
    vars(module)[key] = value
    if inside is not None:
        put_content(value, inside)


def _same(now: _Content, before: _Content) -> bool:
    return now[0] is before[0] and has_content(now[1], before[1])
