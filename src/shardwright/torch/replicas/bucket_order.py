"""Notes when gradients are done, and in which order buckets of them start."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwright.torch.replicas.gradient_buckets import Bucket

# Buckets under way: while one is reduced the next is filled. A backward that is faster than the network would
# leave whole gradients of everything waiting.
_MOST_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """A bucket in its turn.

    Attributes:
        late: gradients come from elsewhere, too: it never starts by itself.
    """

    bucket: Bucket
    late: bool = False


class BucketOrder:
    """Starts buckets in one order, each as soon as it has all its gradients."""

    def __init__(self, turns: Sequence[Turn], *, is_last: bool = True):
        self._turns = turns
        self._is_last = is_last
        self._place_of = {
            id(member.parameter): place for place, turn in enumerate(turns) for member in turn.bucket.members
        }
        self._ready: set[int] = set()
        self._missing: list[int] = []
        self._next = 0
        self.begin()

    def begin(self) -> None:
        """No gradients are there."""
        self._ready.clear()
        self._missing = [len(turn.bucket.members) for turn in self._turns]
        self._next = 0

    def is_there(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        place = self._place_of.get(id(parameter))
        if place is None or id(parameter) in self._ready:
            return
        self._ready.add(id(parameter))
        self._missing[place] -= 1
        while self._next < len(self._turns):
            if self._missing[self._next] or self._turns[self._next].late:
                break
            self._start_next()

    def start_rest(self) -> None:
        """Starts all that have not been started."""
        while self._next < len(self._turns):
            self._start_next()

    def _start_next(self) -> None:
        turn = self._turns[self._next]
        if self._next >= _MOST_UNDER_WAY:
            self._turns[self._next - _MOST_UNDER_WAY].bucket.let_go()
        self._next += 1
        turn.bucket.start(is_last=self._is_last)
