"""A parcel: sharded parameters that are gathered and released together."""

from collections.abc import Mapping, Sequence

from torch import nn

from shardwright.torch.sharding.absent_parameter import Bring
from shardwright.torch.sharding.shard_memory import ShardMemory, Wait
from shardwright.torch.sharding.sharded_parameter import ShardedParameter

__all__ = ["Parcel", "parcels_of"]

# Elements that are gathered together: what comes later can be on its way while these are used.
_SIZE = 2**20


class Parcel:
    """Parameters whose rows are gathered together."""

    def __init__(self, parameters: Sequence[ShardedParameter], memory: ShardMemory):
        self.parameters = parameters
        self.memory = memory
        self.size = memory.layout.whole_size
        self._wait: Wait | None = None
        self._are_here = False

    @property
    def is_here(self) -> bool:
        """All rows are there."""
        return self._are_here

    def begin(self, bring: Bring) -> None:
        """Starts a step; rows that need gathering are absent."""
        self._are_here = not self.memory.gathers
        for each in self.parameters:
            each.begin(None if self._are_here else bring)

    def gather(self) -> None:
        """Starts to bring all rows together; see `ShardMemory.gather`."""
        self._wait = self.memory.gather()

    def arrive(self) -> None:
        """Waits until all rows are there."""
        if self._are_here:
            return
        self.settle()
        self._are_here = True
        for index, each in enumerate(self.parameters):
            each.come(self.memory.whole(index))

    def go(self, bring: Bring) -> None:
        """Releases all rows, in a step."""
        self.settle()
        if self._are_here:
            self._are_here = False
            for each in self.parameters:
                each.go(bring)
        self.memory.release()

    def end(self) -> None:
        """Releases all rows when the step has ended."""
        self._are_here = False
        for each in self.parameters:
            each.forget_rows()
        self.memory.release()

    def leave(self) -> None:
        """Waits for nothing any more: a step has failed in its middle."""
        self._wait = None

    def settle(self) -> None:
        """Waits for rows on their way."""
        if self._wait is not None:
            self._wait()
            self._wait = None


def parcels_of(parameters: Mapping[str, nn.Parameter], *, most: int) -> list[list[str]]:
    """Names of parameters of one type that follow one another."""
    found: list[list[str]] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        if not found or parameter.dtype != dtype or size + parameter.numel() > min(_SIZE, most):
            found.append([])
            size, dtype = 0, parameter.dtype
        found[-1].append(name)
        size += parameter.numel()
    return found
