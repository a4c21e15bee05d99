"""The edges of a schedule: which stage needs tensors of which other."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import ScheduleError

__all__ = ["Edge", "chain_edges", "check_edges"]


@dataclass(frozen=True, slots=True)
class Edge:
    """Tensors that one stage makes and a later one uses, for one microbatch.

    Attributes:
        source: the stage that makes them.
        target: the stage that uses them; larger than `source`, but not always the next (a skip connection).
        num_bytes: bytes sent forward.
        gradient_bytes: bytes of the gradients sent back; None means `num_bytes`.
        has_gradient: False where no gradient returns (integer tensors, frozen parts).

    >>> Edge(0, 2, num_bytes=64).backward_bytes, Edge(0, 1, has_gradient=False).backward_bytes
    (64, 0)
    """

    source: int
    target: int
    num_bytes: int = 0
    gradient_bytes: int | None = None
    has_gradient: bool = True

    @property
    def backward_bytes(self) -> int:
        """Bytes sent back."""
        if not self.has_gradient:
            return 0
        return self.num_bytes if self.gradient_bytes is None else self.gradient_bytes


def chain_edges(num_stages: int, *, num_bytes: int = 0) -> tuple[Edge, ...]:
    """Each stage feeds the next one.

    >>> [(edge.source, edge.target) for edge in chain_edges(3)]
    [(0, 1), (1, 2)]
    """
    return tuple(Edge(stage, stage + 1, num_bytes) for stage in range(num_stages - 1))


def check_edges(edges: Sequence[Edge] | None, *, num_stages: int) -> tuple[Edge, ...]:
    """The edges in order, `chain_edges` where none are given."""
    if edges is None:
        return chain_edges(num_stages)
    pairs = set()
    for edge in edges:
        if not 0 <= edge.source < edge.target < num_stages:
            raise ScheduleError(
                f"edge {edge.source} -> {edge.target} is not possible among {num_stages} stages. "
                f"An edge points from a stage to a later one, both from 0 to {num_stages - 1}."
            )
        pairs.add((edge.source, edge.target))
    if len(pairs) != len(edges):
        raise ScheduleError(
            f"{len(edges)} edges join only {len(pairs)} pairs of stages. "
            "Give one edge a pair, with the bytes of all its tensors."
        )
    return tuple(sorted(edges, key=lambda edge: (edge.source, edge.target)))
