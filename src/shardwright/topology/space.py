"""All ways to train a model on given machines, as columns.

Ways that the formulas can never prefer are left out unless pinned: GPipe (1F1B takes less memory), tensor
parallelism without sequence parallelism, selective recomputation beside fused attention.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import Gathers, Offload, Options, Placement, Recompute, ScheduleKind, Sharded
from shardwright.errors import ConfigError
from shardwright.topology.task import NOT_RUN_YET, Task, does_not_run, runs_experts, runs_shards

__all__ = ["NAMES", "all_ways", "divisors"]

NAMES = tuple(field.name for field in fields(Options))
"""Of the options."""

_LARGEST_MICROBATCH = 64
_MOST_VIRTUAL = 8
_MOST_CONTEXT = 64


def all_ways(task: Task) -> Options:
    """Every way that the machines, the batch, the model and the pins allow."""
    _check_pins(task)
    grids = [grid for grid in _grids(task) if grid.number]
    if not grids:
        raise ConfigError(_contradiction(task))
    numbers = [grid.number for grid in grids]
    columns = {name: np.concatenate([grid.columns[name] for grid in grids]) for name in grids[0].columns}
    for name in grids[0].of_mesh:
        columns[name] = np.repeat([float(grid.of_mesh[name]) for grid in grids], numbers)
    if task.only_what_runs and task.experts > 1:
        columns = _with_experts_that_run(task, columns)
    number = len(columns["expert"])
    for name, value in _same_for_all(task).items():
        # One number in memory, however many rows show it.
        columns[name] = np.broadcast_to(np.float64(value), (number,))
    return Options(**columns)


def _with_experts_that_run(
    task: Task, columns: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """The ways that have experts shared as the runtime can."""
    runs = runs_experts(Options(**columns), num_experts=task.experts)
    if not runs.any():
        pins = " and ".join(f"{name}={value}" for name, value in task.pins.items())
        raise ConfigError(
            f"this version runs no way with {pins}: ranks that share experts may share layers or sequences, "
            "not both, and no shards. expert is a multiple of context, and more than it; expert * tensor is "
            f"at most {task.experts}, the experts of a layer. Unpin one of them, or search all ways."
        )
    return {name: column[runs] for name, column in columns.items()}


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True, slots=True)
class _Grid:
    """The ways of one mesh.

    Attributes:
        of_mesh: options that are the same for all of them.
    """

    number: int
    of_mesh: dict[str, int]
    columns: dict[str, NDArray[np.float64]]


def _same_for_all(task: Task) -> dict[str, float]:
    """Options that are the same for all ways."""
    pins = task.pins
    return {
        "flash": pins.get("flash", 1),
        "hierarchical": pins.get("hierarchical", int(Gathers.FASTER)),
        "kept_layers": pins.get("kept_layers", 0),
        "whole_layers": pins.get("whole_layers", 0),
        "width": task.width,
    }


def _grids(task: Task) -> Iterator[_Grid]:
    """For each mesh, all that is left to choose."""
    ranks = task.machines.num_ranks
    for tensor, pipeline, context in itertools.product(
        _tensor_degrees(task), _pipeline_degrees(task), _context_degrees(task)
    ):
        data, rest = divmod(ranks, tensor * pipeline * context)
        if rest or data == 0 or task.batch % data or not _pinned(task, "data", data):
            continue
        each = task.batch // data
        sizes = _chosen(task, "microbatch", [b for b in divisors(each) if b <= _LARGEST_MICROBATCH])
        batches = [(b, each // b) for b in sizes if _pinned(task, "microbatches", each // b)]
        rows: list[Sequence[Any]] = [
            batches,
            _schedules(task, pipeline),
            _shards(task, data),
            _chosen(task, "expert", _expert_degrees(task, data * context)),
            _recomputations(task),
            _offloads(task),
            _placements(task, pipeline, data),
        ]
        if all(rows):
            yield _grid(task, (tensor, pipeline, context, data), rows)


def _grid(task: Task, mesh: tuple[int, int, int, int], rows: Sequence[Sequence[Any]]) -> _Grid:
    tensor, pipeline, context, data = mesh
    batches, schedules, *others = (np.array(row, dtype=float) for row in rows)
    batch, schedule = (numbers.ravel() for numbers in _combinations(batches, schedules))
    (microbatch, microbatches), (kind, virtual) = batches[batch].T, schedules[schedule].T
    # Interleaving takes its microbatches in rounds of as many as there are ranks.
    fits = (kind != ScheduleKind.INTERLEAVED) | (microbatches % pipeline == 0)
    inner = [row[numbers.ravel()] for row, numbers in zip(others, _combinations(*others), strict=True)]
    (shard, sharded), expert, recompute, offload, placement = inner[0].T, *inner[1:]
    num_outer, num_inner = int(fits.sum()), len(placement)
    outer = {"microbatch": microbatch, "microbatches": microbatches, "schedule": kind, "virtual": virtual}
    each = {"shard": shard, "sharded": sharded, "expert": expert, "recompute": recompute}
    each |= {"offload": offload, "placement": placement}
    return _Grid(
        number=num_outer * num_inner,
        of_mesh={
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "context": context,
            "sequence_parallel": task.pins.get("sequence_parallel", int(tensor > 1)),
        },
        columns={name: np.repeat(column[fits], num_inner) for name, column in outer.items()}
        | {name: np.tile(column, num_outer) for name, column in each.items()},
    )


def _combinations(*rows: NDArray[np.float64]) -> Sequence[NDArray[np.intp]]:
    """Positions in each row, for all combinations of their entries; those of the last change fastest."""
    return np.meshgrid(*(np.arange(len(row)) for row in rows), indexing="ij")


def _tensor_degrees(task: Task) -> list[int]:
    per_node = min(kind.num_accelerators for kind, _ in task.machines.nodes)
    fitting = [t for t in divisors(task.heads) if t <= per_node and per_node % t == 0]
    pinned = task.pins.get("tensor")
    if pinned is not None and task.heads % pinned == 0:
        return [pinned]  # over nodes, too, where somebody wants it
    return _chosen(task, "tensor", fitting)


def _pipeline_degrees(task: Task) -> list[int]:
    layers = task.layers
    return _chosen(task, "pipeline", [p for p in divisors(task.machines.num_ranks) if p <= layers])


def _context_degrees(task: Task) -> list[int]:
    sequence = task.tokens_of_sample
    degrees = [c for c in (2**n for n in range(7)) if c <= _MOST_CONTEXT and sequence % (2 * c) == 0]
    return _chosen(task, "context", degrees or [1])


def _expert_degrees(task: Task, most: int) -> list[int]:
    return [e for e in divisors(task.experts) if most % e == 0]


def _schedules(task: Task, pipeline: int) -> list[tuple[int, int]]:
    """Families of schedules, each with the stages of a rank."""
    if pipeline == 1:
        kinds = [(ScheduleKind.ONE_F_ONE_B, 1)]
    else:
        most = task.layers // pipeline
        kinds = [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.ZB_H1, 1)]
        kinds += [(ScheduleKind.INTERLEAVED, v) for v in range(2, min(most, _MOST_VIRTUAL) + 1)]
        if most >= 2:
            kinds.append((ScheduleKind.ZB_V, 2))
        if task.pins.get("schedule") == ScheduleKind.GPIPE:
            kinds = [(ScheduleKind.GPIPE, 1)]
    return [(k, v) for k, v in kinds if _pinned(task, "schedule", k) and _pinned(task, "virtual", v)]


def _shards(task: Task, data: int) -> list[tuple[int, int]]:
    """Shard groups, each with what they divide."""
    ways = [(1, int(Sharded.NOTHING))]
    ways += [
        (s, int(kind))
        for s in divisors(data)[1:]
        for kind in list(Sharded)[1:]
        if not task.only_what_runs or runs_shards(kind, shard=s, data=data)
    ]
    return [(s, k) for s, k in ways if _pinned(task, "shard", s) and _pinned(task, "sharded", k)]


def _recomputations(task: Task) -> list[int]:
    fused = task.pins.get("flash", 1)
    usual = [Recompute.NONE, Recompute.FULL] if fused else list(Recompute)
    pinned = task.pins.get("recompute")
    return [int(pinned)] if pinned is not None else [int(kind) for kind in usual]


def _offloads(task: Task) -> list[int]:
    kinds = [int(kind) for kind in Offload] if task.has_host_memory else [int(Offload.NOTHING)]
    return _chosen(task, "offload", kinds)


def _placements(task: Task, pipeline: int, data: int) -> list[int]:
    several = pipeline > 1 and data > 1 and task.machines.num_nodes > 1
    return _chosen(task, "placement", [int(kind) for kind in Placement][: 2 if several else 1])


def _chosen(task: Task, name: str, values: Iterable[int]) -> list[int]:
    """The values that pins and this version allow."""
    if task.only_what_runs:
        values = [value for value in values if not does_not_run(name, value)]
    return [value for value in values if _pinned(task, name, value)]


def _pinned(task: Task, name: str, value: int) -> bool:
    return task.pins.get(name, value) == value


def _check_pins(task: Task) -> None:
    for name, value in task.pins.items():
        if name not in NAMES:
            raise ConfigError(f"{name!r} is no option of a topology. They are {', '.join(NAMES)}.")
        if name == "offload" and value and not task.has_host_memory:
            raise ConfigError(
                f"offload is {value}, but {task.machines.name} computes where its memory is, and has no "
                "other. Unpin it."
            )
        if name == "width":
            raise ConfigError(f"width is {value}, but the dtype ({task.dtype}) decides it. Unpin it.")
        if value < 0 or (value < 1 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"{name} is {value}, but it must be at least 1.")
        if name == "kept_layers" and (isinstance(task.model, LayerChain) or value > task.layers):
            what = "a chain of layers" if isinstance(task.model, LayerChain) else f"{task.layers} layers"
            raise ConfigError(f"kept_layers is {value}, but {task.model.name} is {what}. Unpin it.")
        if task.only_what_runs and does_not_run(name, value):
            raise ConfigError(
                f"{name} is {value}, but this version does not run {NOT_RUN_YET[name]}. Unpin it, or search "
                "all ways."
            )


_MAY_BE_ZERO = frozenset(
    {
        "sharded",
        "schedule",
        "recompute",
        "offload",
        "sequence_parallel",
        "flash",
        "hierarchical",
        "kept_layers",
        "whole_layers",
        "placement",
    }
)


def _contradiction(task: Task) -> str:
    """The pins that leave nothing: one of them by itself, else two, else all."""
    ranks, layers = task.machines.num_ranks, task.layers
    facts = (
        f"{task.model.name} has {layers} layers and {task.heads} heads, the machines {ranks} ranks, "
        f"and a step {task.batch} samples"
    )
    pins = dict(task.pins)
    for number in (1, 2):
        for names in itertools.combinations(pins, number):
            if not _any_way(task, {name: pins[name] for name in names}):
                text = " and ".join(f"{name}={pins[name]}" for name in names)
                return f"no way to train has {text}: {facts}. Unpin {'it' if number == 1 else 'one of them'}."
    text = ", ".join(f"{name}={value}" for name, value in pins.items()) or "these machines"
    return f"no way to train has {text}: {facts}."


def _any_way(task: Task, pins: dict[str, int]) -> bool:
    return any(grid.number for grid in _grids(replace(task, pins=pins)))
