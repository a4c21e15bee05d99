"""Notes when gradients are done, and in which order buckets of them start."""

from collections.abc import Sequence

from torch import Tensor

from shardwright.torch.replicas.gradient_buckets import Bucket

# Buckets under way: while one is reduced the next is filled. A backward that is faster than the network would
# leave whole gradients of everything waiting.
_MOST_UNDER_WAY = 2


class BucketOrder:
    """Starts buckets in one order, each as soon as it has all its gradients."""

    def __init__(self, buckets: Sequence[Bucket], *, is_last: bool = True):
        self._buckets = buckets
        self._is_last = is_last
        self._place_of = {
            id(member.parameter): place for place, bucket in enumerate(buckets) for member in bucket.members
        }
        self._ready: set[int] = set()
        self._missing: list[int] = []
        self._next = 0
        self.begin()

    def begin(self) -> None:
        """No gradients are there."""
        self._ready.clear()
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._next = 0

    def is_there(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        place = self._place_of.get(id(parameter))
        if place is None or id(parameter) in self._ready:
            return
        self._ready.add(id(parameter))
        self._missing[place] -= 1
        while self._next < len(self._buckets):
            if self._missing[self._next] or self._buckets[self._next].late:
                break
            self._start_next()

    def start_rest(self) -> None:
        """Starts all that have not been started."""
        while self._next < len(self._buckets):
            self._start_next()

    def _start_next(self) -> None:
        if self._next >= _MOST_UNDER_WAY:
            self._buckets[self._next - _MOST_UNDER_WAY].let_go()
        self._next += 1
        self._buckets[self._next - 1].start(is_last=self._is_last)
