"""The grid of ranks: named axes, coordinates and groups, in pure arithmetic.

The world is a grid. Its axes, from the slowest varying over the ranks to the fastest:

    ============ ====================================================================
    pp           the stages of one replica of the model
    dp_replicate replicas that hold the same parameters, each with batches of its own
    dp_shard     replicas that share their parameters, each with batches of its own
    cp           ranks that share the sequences of a batch
    ep           ranks that share the experts of a stage
    tp           ranks that share every layer of a stage
    ============ ====================================================================

Settings and plan files name the order of placement by three letters: ``P`` is pp, ``T`` is tp, and ``D`` is
dp_replicate, dp_shard, cp and ep, in this order. Eight ranks, 2 stages and 4 replicas::

    placement DPT ("cluster")               placement TPD ("spread")

           data 0   1   2   3                      data 0   1   2   3
    pipeline 0  0   2   4   6               pipeline 0  0   1   2   3
    pipeline 1  1   3   5   7               pipeline 1  4   5   6   7

"cluster" keeps the stages of a replica on neighbouring ranks, "spread" puts them as far apart as possible.

A group holds the ranks that differ only along some axes. Each single axis gives a group, and so do these
named unions of axes:

    ===== ======================= ==================================================
    rdp   dp_replicate, dp_shard  replicas: ranks with batches of their own
    share cp, ep, tp              ranks that share a batch, and work on it together
    dp    all but pp              the ranks of one stage
    mp    pp, cp, ep, tp          one whole replica of the model
    world all
    ===== ======================= ==================================================

so that ``mp * rdp`` and ``pp * dp`` equal the number of ranks. Of 8 replicas, 4 of which share parameters::

    rdp           0  1  2  3  4  5  6  7
    dp_shard      0  1  2  3 | 4  5  6  7         ranks that together have all parameters of a stage
    dp_replicate  0 and 4, 1 and 5, ...           ranks that have the same part of them
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, Self, get_args

from shardwright.errors import ConfigError

AxisName = Literal["pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"]
Axes = AxisName | Literal["rdp", "share", "dp", "mp", "world"] | tuple[AxisName, ...]
"""An axis, a union of axes that has a name, or any other union."""

_NAMES: tuple[AxisName, ...] = get_args(AxisName)
_UNIONS: dict[str, tuple[AxisName, ...]] = {
    "rdp": ("dp_replicate", "dp_shard"),
    "share": ("cp", "ep", "tp"),
    "dp": ("dp_replicate", "dp_shard", "cp", "ep", "tp"),
    "mp": ("pp", "cp", "ep", "tp"),
    "world": _NAMES,
}
_LETTERS: dict[str, tuple[AxisName, ...]] = {
    "D": ("dp_replicate", "dp_shard", "cp", "ep"),
    "P": ("pp",),
    "T": ("tp",),
}
_PLACEMENT_NAMES = {"CLUSTER": "DPT", "SPREAD": "TPD"}


class Axis(NamedTuple):
    """One axis of the grid."""

    name: AxisName
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks of a world are laid out.

    Attributes:
        axes: in the order of placement: the last one varies fastest over the ranks. Those left out have size
            1, and come last.

    >>> mesh = Mesh((Axis("pp", 2), Axis("dp_replicate", 2), Axis("dp_shard", 2)))
    >>> mesh.groups("pp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mesh.group("dp_shard", 5), mesh.group(("pp", "dp_shard"), 5)
    ((4, 5), (0, 1, 4, 5))
    """

    axes: tuple[Axis, ...]
    _sizes: dict[AxisName, int] = field(init=False, repr=False, compare=False)
    _strides: dict[AxisName, int] = field(init=False, repr=False, compare=False)
    _known: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name, _ in self.axes]
        if sorted(given) != sorted(set(given) & set(_NAMES)):
            raise ConfigError(f"the axes are {', '.join(given)}, but each of {', '.join(_NAMES)} goes once.")
        for name, size in self.axes:
            if size < 1:
                raise ConfigError(f"{name} is {size}, but the size of an axis is at least 1.")
        axes = (*self.axes, *(Axis(name, 1) for name in _NAMES if name not in given))
        strides: dict[AxisName, int] = {}
        stride = 1
        for name, size in reversed(axes):
            strides[name] = stride
            stride *= size
        object.__setattr__(self, "axes", axes)
        sizes = dict(axes)
        object.__setattr__(self, "_sizes", sizes)
        self._known.update({name: prod(sizes[each] for each in union) for name, union in _UNIONS.items()})
        object.__setattr__(self, "_strides", strides)

    @classmethod
    def of(
        cls,
        *,
        world_size: int,
        pipeline: int = 1,
        data: int = 1,
        tensor: int = 1,
        context: int = 1,
        expert: int = 1,
        shard: int = 1,
        placement: str = "DPT",
    ) -> Self:
        """The grid that settings ask for."""
        letters = canonical_placement(placement)
        degrees = {"pipeline": pipeline, "data": data, "context": context, "expert": expert, "tensor": tensor}
        for what, degree in degrees.items():
            if degree < 1:
                raise ConfigError(f"{what} is {degree}, but a degree of parallelism is at least 1.")
        if prod(degrees.values()) != world_size:
            raise ConfigError(_mismatch(degrees, world_size))
        if shard < 1 or data % shard:
            raise ConfigError(_no_divisor(shard, data))
        sizes = {"pp": pipeline, "dp_replicate": data // shard, "dp_shard": shard}
        sizes |= {"cp": context, "ep": expert, "tp": tensor}
        return cls(tuple(Axis(name, sizes.get(name, 1)) for letter in letters for name in _LETTERS[letter]))

    # ---- degrees, as settings and plan files name them ----

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group_size("world")

    @property
    def pipeline(self) -> int:
        """Ranks that share one replica of the model, stage by stage."""
        return self._sizes["pp"]

    @property
    def data(self) -> int:
        """Replicas, each with its own batches."""
        return self.group_size("rdp")

    @property
    def tensor(self) -> int:
        """Ranks that share every layer of a stage."""
        return self._sizes["tp"]

    @property
    def context(self) -> int:
        """Ranks that share the sequences of a batch."""
        return self._sizes["cp"]

    @property
    def expert(self) -> int:
        """Ranks that share the experts of a stage."""
        return self._sizes["ep"]

    @property
    def share(self) -> int:
        """Ranks that share a batch, and work on it together: their layers, its sequences, or the experts."""
        return self.group_size("share")

    @property
    def parts(self) -> int:
        """Ranks that have different parts of the parameters of a stage: of its layers, or the experts."""
        return self.share if self.expert > 1 else self.tensor

    @property
    def inner(self) -> AxisName | None:
        """Where ranks share a batch in two ways, the axis of those that share each part; None elsewhere."""
        inner: tuple[AxisName, ...] = ("tp", "ep")
        return next((name for name in inner if self._sizes[name] not in (1, self.share)), None)

    @property
    def outer(self) -> tuple[AxisName, ...]:
        """The axes of those that have other parts of the batch, where ranks share it in two ways."""
        return tuple(name for name in _UNIONS["share"] if name != self.inner)

    @property
    def inner_ranks(self) -> int:
        """Ranks along that axis."""
        return 1 if self.inner is None else self._sizes[self.inner]

    @property
    def title(self) -> str:
        """The degrees as an equation has them; context, expert and tensor where they are not 1."""
        shared = {"context": self.context, "expert": self.expert, "tensor": self.tensor}
        return _product({"pipeline": self.pipeline, "data": self.data, **shared})

    @property
    def shared_title(self) -> str:
        """How ranks share a batch, behind other degrees: `` x context 2``; empty where they do not."""
        degrees = {"context": self.context, "expert": self.expert, "tensor": self.tensor}
        return "".join(f" x {name} {degree}" for name, degree in degrees.items() if degree > 1)

    @property
    def spreads_model(self) -> bool:
        """Whether several ranks share one replica of the model."""
        return self.group_size("mp") > 1

    @property
    def shard(self) -> int:
        """Replicas that share parameters and optimizer state."""
        return self._sizes["dp_shard"]

    @property
    def placement(self) -> str:
        """The order of the axes as a permutation of ``D``, ``P``, ``T``."""
        order = [name for name, _ in self.axes]
        letters = "".join(sorted("DPT", key=lambda letter: order.index(_LETTERS[letter][0])))
        if [name for letter in letters for name in _LETTERS[letter]] != order:
            raise ConfigError(f"the order {', '.join(order)} of axes has no name of three letters.")
        return letters

    # ---- ranks and groups ----

    def group_size(self, axes: Axes) -> int:
        """Number of ranks in each group along these axes."""
        size: int | None = self._known.get(axes)
        return prod(self._sizes[name] for name in _named(axes)) if size is None else size

    def group_rank(self, axes: Axes, rank: int) -> int:
        """Position of a world rank in its group along these axes, from 0."""
        at: int | None = self._known.get((axes, rank, "at"))
        if at is not None:
            return at
        self._check_rank(rank)
        wanted, position = _named(axes), 0
        for name, size in self.axes:
            if name in wanted:
                position = position * size + rank // self._strides[name] % size
        self._known[axes, rank, "at"] = position
        return position

    def rank_of(self, **positions: int) -> int:
        """The world rank at the given positions along axes, or along unions of them; 0 along all others.

        >>> Mesh.of(world_size=8, pipeline=2, data=4, shard=2).rank_of(pp=1, rdp=3)
        7
        """
        rank = 0
        for axes, position in positions.items():
            wanted = _named(axes)  # type: ignore[arg-type]
            size = prod(self._sizes[name] for name in wanted)
            if not 0 <= position < size:
                raise ConfigError(f"position {axes} is {position}, but it runs from 0 to {size - 1}.")
            for name, length in reversed(self.axes):
                if name in wanted:
                    position, at = divmod(position, length)
                    rank += at * self._strides[name]
        return rank

    def group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """World ranks that differ from `rank` along these axes only, itself among them, ascending."""
        found: tuple[int, ...] | None = self._known.get((axes, rank))
        if found is None:  # steps ask for their own again and again
            self._check_rank(rank)
            found = self._known[axes, rank] = self._group(axes, rank)
        return found

    def _group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        wanted = _named(axes)
        ranks = [rank]
        for name, size in self.axes:
            if name in wanted and size > 1:
                stride = self._strides[name]
                first = rank // stride % size
                ranks = [other + (at - first) * stride for other in ranks for at in range(size)]
        return tuple(sorted(ranks))

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups along these axes, ordered by their first rank; together they hold every rank once."""
        found: tuple[tuple[int, ...], ...] | None = self._known.get((axes, None))
        if found is None:
            of_ranks = (self._group(axes, rank) for rank in range(self.world_size))
            found = self._known[axes, None] = tuple(dict.fromkeys(of_ranks))
        return found

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in a world of {self.world_size}: ranks run from 0.")


def canonical_placement(name: str) -> str:
    """The permutation of ``D``, ``P``, ``T`` that a placement strategy names.

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


def _named(axes: Axes) -> tuple[AxisName, ...]:
    """The axes that a name, or a collection of names, stands for."""
    names = _UNIONS.get(axes, (axes,)) if isinstance(axes, str) else axes
    for name in names:
        if name not in _NAMES:
            raise ConfigError(
                f"{name!r} is not an axis of the mesh: use {', '.join(_NAMES)}, "
                f"or one of {', '.join(_UNIONS)} for several."
            )
    return names  # type: ignore[return-value]


def _mismatch(degrees: dict[str, int], world_size: int) -> str:
    equation = _product(degrees)
    needed = prod(degrees.values())
    return (
        f"{equation} != WORLD_SIZE({world_size}). Start {needed} rank{'s' if needed != 1 else ''}, "
        "or change a degree so that the product is the number of ranks."
    )


def _product(degrees: dict[str, int]) -> str:
    shown = {axis: n for axis, n in degrees.items() if axis in ("pipeline", "data") or n != 1}
    return " * ".join(f"{axis}({degree})" for axis, degree in shown.items())


def _no_divisor(shard: int, data: int) -> str:
    divisors = ", ".join(str(degree) for degree in range(1, data + 1) if data % degree == 0)
    return (
        f"sharded_data_parallel_degree is {shard}, which does not divide the {data} replica"
        f"{'s' if data != 1 else ''} of each stage. Use one of {divisors}."
    )
