"""The grid of ranks: axes, coordinates and groups, in pure arithmetic.

The world is a grid with three axes, ``P`` (pipeline), ``D`` (data) and ``T`` (tensor). The placement is a
permutation of the three letters; the rightmost varies fastest over the ranks. Eight ranks, 2 x 4::

    placement DPT ("cluster")               placement TPD ("spread")

           data 0   1   2   3                      data 0   1   2   3
    pipeline 0  0   2   4   6               pipeline 0  0   1   2   3
    pipeline 1  1   3   5   7               pipeline 1  4   5   6   7

"cluster" keeps the stages of a replica on neighbouring ranks, "spread" puts them as far apart as possible.

Groups, by the axes along which their members differ:

    ==== ======= ===================================================================
    pp   P       the stages of one replica (with one tensor coordinate)
    tp   T       ranks that share the layers of one stage
    rdp  D       ranks that compute with the same parameters
    dp   D and T ranks of one pipeline stage
    mp   P and T one whole replica of the model
    ==== ======= ===================================================================

so that ``mp * rdp``, ``pp * dp`` and ``pp * tp * rdp`` all equal the number of ranks.

The replicas along ``D`` may share their parameters and optimizer state. Every `shard` consecutive ones form a
shard group, in which each has a part; the ranks that have the same part are replicas of one another::

    data            0  1  2  3  4  5  6  7          shard 4
    shard groups    0  1  2  3 | 4  5  6  7         ranks that together have all parameters of a stage
    replicas        0 and 4, 1 and 5, ...           ranks that have the same part of them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwright.errors import ConfigError

__all__ = ["Coordinates", "GroupKind", "Mesh", "canonical_placement"]

GroupKind = Literal["world", "pp", "tp", "rdp", "dp", "mp", "shard", "replicas"]

_GROUP_AXES: dict[str, str] = {
    "world": "PDT",
    "pp": "P",
    "tp": "T",
    "rdp": "D",
    "dp": "DT",
    "mp": "PT",
    "shard": "D",
    "replicas": "D",
}
_PLACEMENT_NAMES = {"CLUSTER": "DPT", "SPREAD": "TPD"}


class Coordinates(NamedTuple):
    """Where a rank stands in the grid."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the ranks of a world are laid out.

    Attributes:
        world_size: number of ranks.
        pipeline: ranks that share one replica of the model, stage by stage.
        data: replicas, each with its own batches.
        tensor: ranks that share every layer of a stage.
        shard: replicas that share parameters and optimizer state; 1 where each has all of them.
        placement: permutation of ``D``, ``P``, ``T``, or ``"cluster"`` (DPT) or ``"spread"`` (TPD).

    Raises:
        ConfigError: the degrees do not multiply to the number of ranks, or the placement is no permutation.

    >>> mesh = Mesh(world_size=8, pipeline=2, data=4, placement="spread")
    >>> mesh.groups("pp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    world_size: int
    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    shard: int = 1
    placement: str = "DPT"

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", canonical_placement(self.placement))
        degrees = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
        for axis, degree in degrees.items():
            if degree < 1:
                raise ConfigError(f"{axis} is {degree}, but a degree of parallelism is at least 1.")
        if self.pipeline * self.data * self.tensor != self.world_size:
            raise ConfigError(_mismatch(degrees, self.world_size))
        if self.shard < 1 or self.data % self.shard:
            raise ConfigError(_no_divisor(self.shard, self.data))

    def degree(self, axis: str) -> int:
        """Size of the axis ``"P"``, ``"D"`` or ``"T"``."""
        return {"P": self.pipeline, "D": self.data, "T": self.tensor}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Where a world rank stands.

        Raises:
            ConfigError: there is no such rank.
        """
        self._check_rank(rank)
        found: dict[str, int] = {}
        rest = rank
        for axis in reversed(self.placement):
            rest, found[axis] = divmod(rest, self.degree(axis))
        return Coordinates(pipeline=found["P"], data=found["D"], tensor=found["T"])

    def rank_of(self, *, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The world rank at the given coordinates.

        Raises:
            ConfigError: a coordinate lies outside the grid.
        """
        wanted = {"P": pipeline, "D": data, "T": tensor}
        rank = 0
        for axis in self.placement:
            degree = self.degree(axis)
            if not 0 <= wanted[axis] < degree:
                raise ConfigError(f"coordinate {axis} is {wanted[axis]}, but it runs from 0 to {degree - 1}.")
            rank = rank * degree + wanted[axis]
        return rank

    def group(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """World ranks of the group of this kind that `rank` belongs to, ascending.

        Raises:
            ConfigError: there is no such rank, or no such kind of group.
        """
        if kind not in _GROUP_AXES:
            raise ConfigError(
                f"{kind!r} is not a kind of group: use one of {', '.join(get_args(GroupKind))}."
            )
        here = dict(zip("PDT", self.coordinates(rank), strict=True))
        ranges: dict[str, Sequence[int]] = {
            axis: range(self.degree(axis)) if axis in _GROUP_AXES[kind] else (here[axis],) for axis in "PDT"
        }
        if kind == "shard":
            first = here["D"] - here["D"] % self.shard
            ranges["D"] = range(first, first + self.shard)
        elif kind == "replicas":
            ranges["D"] = range(here["D"] % self.shard, self.data, self.shard)
        return tuple(
            sorted(
                self.rank_of(pipeline=p, data=d, tensor=t)
                for p in ranges["P"]
                for d in ranges["D"]
                for t in ranges["T"]
            )
        )

    def groups(self, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, ordered by their first rank; together they hold every rank once."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen:
                found.append(self.group(kind, rank))
                seen.update(found[-1])
        return tuple(found)

    def group_rank(self, kind: GroupKind, rank: int) -> int:
        """Position of `rank` in its group of this kind, from 0."""
        return self.group(kind, rank).index(rank)

    def group_size(self, kind: GroupKind) -> int:
        """Number of ranks in each group of this kind."""
        return len(self.group(kind, 0))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in a world of {self.world_size}: ranks run from 0.")


def canonical_placement(name: str) -> str:
    """The permutation of ``D``, ``P``, ``T`` that a placement strategy names.

    Raises:
        ConfigError: it names none.

    >>> canonical_placement("cluster"), canonical_placement("spread"), canonical_placement("ptd")
    ('DPT', 'TPD', 'PTD')
    """
    upper = name.upper()
    permutation = _PLACEMENT_NAMES.get(upper, upper)
    if sorted(permutation) != ["D", "P", "T"]:
        raise ConfigError(
            f"placement_strategy is {name!r}, but it must be cluster, spread or a permutation of the letters "
            "D, P, T such as DPT (the rightmost varies fastest)."
        )
    return permutation


def _mismatch(degrees: dict[str, int], world_size: int) -> str:
    shown = {axis: degree for axis, degree in degrees.items() if axis != "tensor" or degree != 1}
    equation = " * ".join(f"{axis}({degree})" for axis, degree in shown.items())
    needed = degrees["pipeline"] * degrees["data"] * degrees["tensor"]
    return (
        f"{equation} != WORLD_SIZE({world_size}). Start {needed} rank{'s' if needed != 1 else ''}, "
        "or change a degree so that the product is the number of ranks."
    )


def _no_divisor(shard: int, data: int) -> str:
    divisors = ", ".join(str(degree) for degree in range(1, data + 1) if data % degree == 0)
    return (
        f"sharded_data_parallel_degree is {shard}, which does not divide the {data} replica"
        f"{'s' if data != 1 else ''} of each stage. Use one of {divisors}."
    )
