"""All ways to train a model on given machines, as columns.

Ways that the formulas can never prefer are left out unless pinned: GPipe (1F1B takes less memory), tensor
parallelism without sequence parallelism, selective recomputation beside fused attention.
"""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import (
    FLOAT8,
    Gathers,
    Offload,
    Options,
    Placement,
    Recompute,
    ScheduleKind,
    Sharded,
    ways_of,
)
from shardwright.errors import ConfigError
from shardwright.planner.ways.task import Task, runs_experts, runs_shards

NAMES = tuple(field.name for field in fields(Options))
"""Of the options."""

_LARGEST_MICROBATCH = 64
_MOST_VIRTUAL = 8
_MOST_CONTEXT = 64


_OF_MESH = ("tensor", "pipeline", "context", "data", "microbatch", "microbatches", "expert")


def meshes(task: Task) -> Options:
    """The degrees and microbatches that the machines, the batch, the model and the pins allow.

    Of the rest, these are the plainest: `scheduled` and `completed` add it.
    """
    _check_pins(task)
    rows = list(_mesh_rows(task))
    if not rows and task.only_what_runs and next(_mesh_rows(replace(task, only_what_runs=False)), None):
        raise ConfigError(_does_not_run(task))
    if not rows:
        raise ConfigError(_contradiction(task))
    pins = task.pins
    columns = dict(zip(_OF_MESH, np.array(rows, dtype=float).T, strict=True))
    found = Options(
        **columns,
        sequence_parallel=pins.get("sequence_parallel", np.minimum(columns["tensor"] - 1, 1)),
        flash=pins.get("flash", 1),
        hierarchical=pins.get("hierarchical", int(Gathers.FASTER)),
        kept_layers=pins.get("kept_layers", 0),
        whole_layers=pins.get("whole_layers", 0),
        width=task.width,
        float8=int(task.dtype == FLOAT8),
        as_here=int(task.only_what_runs),
        **ways_of(task.runtime),
    )
    if not task.only_what_runs or task.experts == 1:
        return found
    runs = runs_experts(found, num_experts=task.experts)
    if not runs.any():
        raise ConfigError(_does_not_run(task))
    return found.take(np.flatnonzero(runs))


def scheduled(task: Task, some: Options) -> Options:
    """Each of some meshes with each schedule and order of ranks."""
    tables, orders = [], cache(partial(_orders, task))
    for pipeline, data, number in _whole_numbers(some, "pipeline", "data", "microbatches"):
        table = orders(pipeline, data)
        # Interleaving takes its microbatches in rounds of as many as there are ranks.
        whole = number % pipeline == 0
        tables.append(table if whole else table[table[:, 0] != ScheduleKind.INTERLEAVED])
    return _each_with(some, tables, ("schedule", "virtual", "placement"))


def completed(task: Task, some: Options) -> Options:
    """Each of some meshes with each shard group, and what is computed again or offloaded."""
    states = cache(partial(_states, task))
    tables = [states(*row) for row in _whole_numbers(some, "data", "context", "expert")]
    return _each_with(some, tables, ("shard", "sharded", "recompute", "offload"))


def num_ways(task: Task, some: Options) -> int:
    """How many ways meshes make."""
    total, states, orders = 0, cache(partial(_states, task)), cache(partial(_orders, task))
    for _, pipeline, context, data, _, number, expert in _whole_numbers(some, *_OF_MESH):
        table = orders(pipeline, data)
        fitting = len(table) if number % pipeline == 0 else np.sum(table[:, 0] != ScheduleKind.INTERLEAVED)
        total += int(fitting) * len(states(data, context, expert))
    return total


def _whole_numbers(some: Options, *names: str) -> list[list[int]]:
    columns = np.stack([getattr(some, name) for name in names], axis=1)
    found: list[list[int]] = columns.astype(int).tolist()
    return found


def _each_with(some: Options, tables: Sequence[NDArray[np.float64]], names: Sequence[str]) -> Options:
    """Each way as often as its table has rows, with what these say."""
    at = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return replace(some.take(at), **dict(zip(names, np.concatenate(tables).T, strict=True)))


def _orders(task: Task, pipeline: int, data: int) -> NDArray[np.float64]:
    rows = [(*each, p) for each in _schedules(task, pipeline) for p in _placements(task, pipeline, data)]
    return np.array(rows, dtype=float).reshape(len(rows), 3)


def _states(task: Task, data: int, context: int, expert: int) -> NDArray[np.float64]:
    rows = [
        (*shards, again, offload)
        for shards in _shards(task, data, context, expert)
        for again in _recomputations(task)
        for offload in _offloads(task)
    ]
    return np.array(rows, dtype=float).reshape(len(rows), 4)


def _does_not_run(task: Task) -> str:
    pins = " and ".join(pin_text(name, value) for name, value in task.pins.items())
    if task.pins.get("expert", 1) == 1:
        return f"this version runs no way with {pins}. Unpin one of them, or search all ways."
    return (
        f"this version runs no way with {pins}: ranks that share experts may share layers or sequences, not "
        "both. expert is a multiple of context, and more than it; expert * tensor is at most "
        f"{task.experts}, the experts of a layer. Unpin one of them, or search all ways."
    )


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _mesh_rows(task: Task) -> Iterator[tuple[int, ...]]:
    """All `_OF_MESH` that leave something to choose of the rest."""
    states = cache(partial(_states, task))
    for tensor, pipeline, context in itertools.product(
        _tensor_degrees(task), _pipeline_degrees(task), _context_degrees(task)
    ):
        data, rest = divmod(task.machines.num_ranks, tensor * pipeline * context)
        if rest or data == 0 or task.batch % data or not _pinned(task, "data", data):
            continue
        each = task.batch // data
        sizes = _chosen(task, "microbatch", [b for b in divisors(each) if b <= _LARGEST_MICROBATCH])
        experts = _degrees(task, "expert", [e for e in divisors(task.experts) if data * context % e == 0])
        orders = _orders(task, pipeline, data)
        interleaves_alone = set(orders[:, 0]) <= {ScheduleKind.INTERLEAVED}
        for size, expert in itertools.product(sizes, experts):
            alone = data == max(1, expert // context)  # one replica, of ranks that share its batch
            if task.operable and alone and task.machines.num_nodes > 1 and "data" not in task.pins:
                continue
            number = each // size
            if not _pinned(task, "microbatches", number) or (interleaves_alone and number % pipeline):
                continue
            if len(orders) and len(states(data, context, expert)):
                yield tensor, pipeline, context, data, size, number, expert


def _degrees(task: Task, name: str, values: Iterable[int]) -> list[int]:
    """Degrees that pins allow; those that one would operate are powers of two."""
    unusual = not task.operable or name in task.pins
    return _chosen(task, name, [value for value in values if unusual or value & (value - 1) == 0])


def _tensor_degrees(task: Task) -> list[int]:
    per_node = min(kind.num_accelerators for kind, _ in task.machines.nodes)
    fitting = [t for t in divisors(task.heads) if t <= per_node and per_node % t == 0]
    pinned = task.pins.get("tensor")
    if pinned is not None and task.heads % pinned == 0:
        return [pinned]  # over nodes, too, where somebody wants it
    return _degrees(task, "tensor", fitting)


def _pipeline_degrees(task: Task) -> list[int]:
    layers = task.layers
    return _degrees(task, "pipeline", [p for p in divisors(task.machines.num_ranks) if p <= layers])


def _context_degrees(task: Task) -> list[int]:
    sequence = task.tokens_of_sample
    degrees = [c for c in (2**n for n in range(7)) if c <= _MOST_CONTEXT and sequence % (2 * c) == 0]
    return _chosen(task, "context", degrees or [1])


def _schedules(task: Task, pipeline: int) -> list[tuple[int, int]]:
    """Families of schedules, each with the stages of a rank."""
    if pipeline == 1:
        kinds = [(ScheduleKind.ONE_F_ONE_B, 1)]
    else:
        # The embedding and the head may be stages of their own: 126 layers are 16 times 8 stages.
        apart = 0 if isinstance(task.model, LayerChain) else 2
        most = (task.layers + apart) // pipeline
        kinds = [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.ZB_H1, 1)]
        kinds += [(ScheduleKind.INTERLEAVED, v) for v in range(2, min(most, _MOST_VIRTUAL) + 1)]
        if most >= 2:
            kinds.append((ScheduleKind.ZB_V, 2))
        if task.pins.get("schedule") == ScheduleKind.GPIPE:
            kinds = [(ScheduleKind.GPIPE, 1)]
    return [(k, v) for k, v in kinds if _pinned(task, "schedule", k) and _pinned(task, "virtual", v)]


def _shards(task: Task, data: int, context: int, expert: int) -> list[tuple[int, int]]:
    """Shard groups, each with what they divide: ranks that share a sequence have the same parameters, too."""
    ways = [(1, int(Sharded.NOTHING))]
    if not task.only_what_runs:
        ways += [(s, int(kind)) for s in divisors(data * context)[1:] for kind in list(Sharded)[1:]]
    elif data * context % expert == 0:
        alike = data // max(1, expert // context)  # replicas that have the same experts
        ways += [
            (s, int(kind))
            for s in divisors(alike)[1:]
            for kind in list(Sharded)[1:]
            if runs_shards(kind, shard=s, data=alike)
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
    """The values that pins allow."""
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
        if name == "as_here":
            raise ConfigError(f"as_here is {value}, but what runs decides it. Unpin it.")
        if name in ("width", "float8"):
            raise ConfigError(f"{name} is {value}, but the dtype ({task.dtype}) decides it. Unpin it.")
        if name in ways_of(task.runtime):
            raise ConfigError(f"{name} is {value}, but the runtime ({task.runtime}) decides it. Unpin it.")
        if value < 0 or (value < 1 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"{name} is {value}, but it must be at least 1.")
        if name == "kept_layers" and (isinstance(task.model, LayerChain) or value > task.layers):
            what = "a chain of layers" if isinstance(task.model, LayerChain) else f"{task.layers} layers"
            raise ConfigError(f"kept_layers is {value}, but {task.model.name} is {what}. Unpin it.")


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
    experts = f", {task.experts} experts" if task.experts > 1 else ""
    facts = (
        f"{task.model.name} has {layers} layers{experts} and {task.heads} heads, the machines {ranks} ranks, "
        f"and a step {task.batch} samples; at most {_LARGEST_MICROBATCH} are a microbatch, {_MOST_VIRTUAL} "
        f"stages of a rank, and {_MOST_CONTEXT} ranks share a sequence"
    )
    pins = dict(task.pins)
    for number in (1, 2):
        for names in itertools.combinations(pins, number):
            if not _any_way(task, {name: pins[name] for name in names}):
                text = " and ".join(pin_text(name, pins[name]) for name in names)
                return f"no way to train has {text}: {facts}. Unpin {'it' if number == 1 else 'one of them'}."
    text = ", ".join(pin_text(name, value) for name, value in pins.items()) or "these machines"
    return f"no way to train has {text}: {facts}."


def _any_way(task: Task, pins: dict[str, int]) -> bool:
    return next(_mesh_rows(replace(task, pins=pins)), None) is not None


_CHOICES: Mapping[str, type[IntEnum]] = {
    "schedule": ScheduleKind,
    "sharded": Sharded,
    "recompute": Recompute,
    "offload": Offload,
    "placement": Placement,
    "hierarchical": Gathers,
}
_SWITCHES = frozenset({"sequence_parallel", "flash", "whole_layers"})
_MOST_DIGITS = 12
_SETTING = "expert_parallel_degree"
_OTHER_NAMES = {
    "1f1b": "one_f_one_b",
    "interleaved_1f1b": "interleaved",
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "data_parallel_degree": "data",
    "context_parallel_degree": "context",
    "sharded_data_parallel_degree": "shard",
    "virtual_stages": "virtual",
    "vp": "virtual",
    "zero": "sharded",
    "mbs": "microbatch",
    "micro_batch_size": "microbatch",
    "m": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "pipeline_schedule": "schedule",
}


def parse_pins(texts: Iterable[str]) -> dict[str, int]:
    """Reads pins.

    >>> parse_pins(["tp=8, zero=3, recompute=full", "schedule=zb_h1"])
    {'tensor': 8, 'sharded': 3, 'recompute': 2, 'schedule': 3}
    """
    found: dict[str, int] = {}
    experts: int | None = None
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise ConfigError(f"{text!r} is no option and value, such as tensor=8.")
        if name.lower().replace("-", "_") == _SETTING:
            degree = _value(_SETTING, value)
            if experts not in (None, degree):
                raise ConfigError(f"{_SETTING} is given as {experts} and as {degree}. Give it once.")
            experts = degree
            continue
        name = _name(name)
        number = _value(name, value)
        if found.setdefault(name, number) != number:
            raise ConfigError(f"{name} is given as {found[name]} and as {number}. Give it once.")
    if experts is not None:
        found["expert"] = _expert(experts, found)
    return found


def pin_text(name: str, value: int) -> str:
    """A pin as somebody would write it.

    >>> pin_text("recompute", 2)
    'recompute=full'
    """
    return f"{name}={_CHOICES[name](value).name.lower() if name in _CHOICES else value}"


def values_of(name: str) -> str:
    """The values that a pin takes by name; empty where it takes numbers.

    >>> values_of("recompute")
    'none, selective, full'
    """
    return ", ".join(choice.lower() for choice in _CHOICES[name].__members__) if name in _CHOICES else ""


def _expert(degree: int, pins: Mapping[str, int]) -> int:
    """The pin for this `expert_parallel_degree` of the settings, which counts no ranks of a sequence."""
    if degree > 1 and "context" not in pins:
        raise ConfigError(
            f"{_SETTING}={degree} is a setting, which does not count the ranks of a sequence; the pin expert "
            f"does. Pin context as well: context=1, expert={degree}; or context=2, expert={2 * degree}; ..."
        )
    number = degree * pins["context"] if degree > 1 else degree
    if pins.get("expert", number) != number:
        raise ConfigError(
            f"{_SETTING}={degree} is expert={number} with context={pins.get('context', 1)}, but expert is "
            f"given as {pins['expert']}. Give one of the two."
        )
    return number


def _name(text: str) -> str:
    plain = text.lower().replace("-", "_")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain in NAMES:
        return plain
    near = difflib.get_close_matches(plain, [*NAMES, *_OTHER_NAMES, _SETTING], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(NAMES)}."
    raise ConfigError(f"{text!r} is no option of a topology; {hint}")


def _value(name: str, text: str) -> int:
    if name in _CHOICES and not text.isdecimal():
        plain = text.lower().replace("-", "_")
        plain = _OTHER_NAMES.get(plain, plain).upper()
        choices = _CHOICES[name]
        if plain not in choices.__members__:
            raise ConfigError(f"{name} is {text!r}, but it must be one of {values_of(name)}.")
        return int(choices[plain])
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        shown = text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        raise ConfigError(
            f"{name} is {shown!r}, but it must be a whole number of at most {_MOST_DIGITS} digits."
        )
    number = int(text)
    if name in _SWITCHES and number > 1:
        raise ConfigError(f"{name} is {number}, but it must be 0 or 1.")
    if name in _CHOICES and number not in list(_CHOICES[name]):
        raise ConfigError(f"{name} is {number}, but it must be from 0 to {len(_CHOICES[name]) - 1}.")
    return number
